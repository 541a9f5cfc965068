from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from lit_stable.callbacks.seeds import mix, seed_torch


def test_mix_is_the_same_on_every_machine() -> None:
    # Of nothing, it is the initial state; of one value, SplitMix64's second output for the seed `value`.
    assert mix() == 0x9E3779B97F4A7C15
    assert mix(0) == 0x6E789E6AA1B965F4
    assert mix(1, 2, 3) == 15205877802699428709


def test_mix_is_an_unsigned_64_bit_integer() -> None:
    values = [mix(i, -i, 1 << 80) for i in range(1000)]
    assert all(0 <= v < 1 << 64 for v in values)
    assert len(set(values)) == 1000


def test_mix_takes_negative_values_modulo_two_to_the_64() -> None:
    assert mix(-1) == mix((1 << 64) - 1)


def test_mix_depends_on_the_order_and_on_every_value() -> None:
    assert mix(1, 2) != mix(2, 1)
    assert mix(1) != mix(1, 0)


def test_mix_flips_half_of_the_bits_when_one_bit_of_one_value_changes() -> None:
    flips = [(mix(7, 9, 11) ^ mix(7, 9 ^ (1 << bit), 11)).bit_count() for bit in range(64)]
    # 64 draws of a Binomial(64, 1/2) mean: standard deviation 0.5.
    assert abs(sum(flips) / 64 - 32) < 2.5


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("seed", [0, 5, (1 << 63) - 1])
def test_torch_draws_what_its_own_function_makes_it_draw(device: str, seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(4)
    seed_torch(seed, torch.device(device))
    assert torch.equal(torch.rand(4), expected)


def test_cuda_is_seeded_where_it_is_in_use() -> None:
    with patch("torch.cuda.is_initialized", return_value=True), patch("torch.cuda.manual_seed_all") as seeded:
        seed_torch(5, torch.device("cuda"))
    seeded.assert_called_once_with(5)


def test_a_device_of_another_kind_is_left_to_torch() -> None:
    with patch("torch.manual_seed") as seeded:
        seed_torch(5, torch.device("xpu"))
    seeded.assert_called_once_with(5)


def test_no_stack_is_formatted_for_devices_that_nothing_uses() -> None:
    with patch("traceback.format_stack") as formatted:
        seed_torch(5, torch.device("cpu"))
    formatted.assert_not_called()
