"""On one process there is nobody to agree with; two ranks: tests/distributed, by those that agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lit_stable.callbacks.host_agreement import HostAgreement


def test_one_process_opens_no_group_and_is_of_its_own_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "new_group", lambda **options: pytest.fail("a group for one"))
    agreement, trainer = HostAgreement(), SimpleNamespace(world_size=1)
    agreement.open(trainer)  # type: ignore[arg-type]
    assert agreement.largest(3) == 3
    assert agreement.from_rank_0(["mine"]) == ["mine"]
    agreement.close()


def test_a_group_is_opened_once_and_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda **options: done.append(options) or "group")
    monkeypatch.setattr(dist, "destroy_process_group", done.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    agreement, trainer = HostAgreement(), SimpleNamespace(world_size=2)
    for _ in range(2):
        agreement.open(trainer)  # type: ignore[arg-type]
    for _ in range(2):
        agreement.close()
    assert done == [{"backend": "gloo"}, "group"]


def test_the_wait_for_sums_can_be_clocked_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    @contextmanager
    def clocked() -> Iterator[None]:
        order.append("begins")
        yield
        order.append("ends")

    monkeypatch.setattr(dist, "new_group", lambda **options: "group")
    monkeypatch.setattr(
        dist, "all_reduce", lambda *rest, **options: SimpleNamespace(wait=lambda: order.append("waits"))
    )
    agreement = HostAgreement()
    agreement.open(SimpleNamespace(world_size=2))  # type: ignore[arg-type]
    agreement.waiting = clocked
    wait = agreement.begin_sums([3, 4])
    assert order == []
    assert wait() == [3, 4]
    assert order == ["begins", "waits", "ends"]
    agreement.close()
    assert agreement.waiting is nullcontext
