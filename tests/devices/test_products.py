from __future__ import annotations

import torch
from torch import Tensor

from lit_stable.devices.products import known_product, try_products

CPU = torch.device("cpu")


class Fault:
    """Flips the lowest bit of one element of the ``at``-th product."""

    def __init__(self, *at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        result = left @ right
        if self.count in self.at and result.dtype == torch.float32:
            result.view(torch.int32)[3, 4] ^= 1
        self.count += 1
        return result


def test_a_sound_device_has_the_answer_in_both_types() -> None:
    found = try_products(CPU, rounds=3)
    assert found.problems == []
    assert found.tflops > 0
    assert found.hash == try_products(CPU, rounds=2).hash


def test_the_answer_is_that_of_whole_numbers() -> None:
    left, right, answer = known_product(64)
    assert torch.equal((left.long() @ right.long()).float(), answer)


def test_one_bit_once_is_found() -> None:
    assert try_products(CPU, 4, Fault(2)).problems == [
        "1 of 4 times the same float32 product had other bits",
        "1 of 4 float32 products were wrong, in up to 1 elements",
    ]


def test_a_device_that_is_always_wrong_in_the_same_way_is_found() -> None:
    found = try_products(CPU, 3, Fault(0, 1, 2))
    assert found.problems == ["3 of 3 float32 products were wrong, in up to 1 elements"]
    assert found.hash != try_products(CPU, 3).hash
