from __future__ import annotations

from typing import Any

from lit_stable.devices.links import LinkTest
from lit_stable.devices.verdict import Found, page, verdict


def device(rank: int, **changes: Any) -> Found:
    links = LinkTest(all_reduce_gbs=300.0, next_gbs=100.0)
    for name in vars(links).keys() & changes.keys():
        setattr(links, name, changes.pop(name))
    return Found(**{"name": f"rank {rank}", "kind": "H100", "hash": 7, "tflops": 600.0, "links": links, **changes})


def test_devices_that_agree_are_well() -> None:
    found = [device(rank) for rank in range(4)]
    assert verdict(found) == []
    assert page(found, []).splitlines()[1].split() == ["rank", "0", "H100", "600", "300", "100"]
    assert page(found, []).endswith("\n4 devices, all well")


def test_each_fault_names_its_device() -> None:
    found = [device(0), device(1, tflops=300.0), device(2, hash=8), device(3, next_gbs=20.0), device(4)]
    assert verdict(found) == [
        "rank 1: its products: 300 TFLOP/s, where the median of devices like it is 600",
        "rank 2: its products have other bits than those of 4 devices like it",
        "rank 3: its link to the next rank: 20 GB/s, where the median of devices like it is 100",
    ]


def test_devices_of_another_model_are_not_compared() -> None:
    assert verdict([device(0), device(1), device(2, kind="V100", hash=9, tflops=90.0)]) == []


def test_who_sends_wrong_is_named_and_not_those_who_received_it() -> None:
    found = [device(rank, bad_senders=[2], wrong_sums=5, wrong_from_before=rank == 3) for rank in range(4)]
    assert verdict(found) == ["rank 2: what it sends came wrong on 4 of 4 ranks"]


def test_a_link_or_a_sum_that_is_wrong_on_one_rank_alone_is_that_ranks() -> None:
    found = [device(0), device(1, wrong_from_before=True, wrong_sums=1, bad_senders=[0]), device(2)]
    assert verdict(found) == [
        "rank 1: what rank 0 sends came wrong here",
        "rank 1: 1 sums over all ranks came out wrong",
    ]
