"""Rotary phases: exact in fp32, relative, and out of reach of casts."""

from __future__ import annotations

import math

import torch

from lit_stable.model.rotary import Rotary

CPU = torch.device("cpu")


def test_one_pair_turns_by_its_position_in_radians():
    turned = Rotary(3, 2, 10000.0, CPU).rotate(torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2))
    expected = torch.tensor([[math.cos(t), math.sin(t)] for t in range(3)])
    torch.testing.assert_close(turned[0, :, 0], expected)


def test_second_pair_of_four_turns_slower_by_root_theta():
    x = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 6, 1, 4)  # entries 1 and 3 are a pair
    turned = Rotary(6, 4, 100.0, CPU).rotate(x)[0, 5, 0]
    torch.testing.assert_close(turned, torch.tensor([0.0, math.cos(0.5), 0.0, math.sin(0.5)]))


def test_scores_depend_on_distance_only():
    torch.manual_seed(0)
    rope = Rotary(64, 16, 10000.0, CPU)
    q, k = (rope.rotate(torch.randn(16).expand(1, 64, 1, 16))[0, :, 0] for _ in range(2))
    scores = q @ k.T
    for distance in (0, 1, 7, 40):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)
    assert (scores.diagonal() - scores.diagonal(-7)[0]).abs().min() > 1e-3


def test_rotation_keeps_length_and_dtype():
    x = torch.randn(2, 8, 3, 4)
    rope = Rotary(8, 4, 10000.0, CPU)
    torch.testing.assert_close(rope.rotate(x).norm(dim=-1), x.norm(dim=-1))
    assert rope.rotate(x.bfloat16()).dtype == torch.bfloat16


def test_300_positions_stay_distinct_under_autocast():
    # As bf16 numbers the positions 0..299 take 279 values.
    with torch.autocast("cpu", torch.bfloat16):
        rope = Rotary(300, 64, 10000.0, CPU)
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    assert len(torch.cat((rope.cos, rope.sin), -1).unique(dim=0)) == 300
    exact = torch.arange(300, dtype=torch.float64).cos()
    assert (rope.cos[:, 0] - exact).abs().max() < 1e-6


def test_position_1000_is_where_it_is_where_bf16_is_the_default_dtype():
    # As within a forward pass under bf16-true, where positions above 256 would share a number.
    exact = Rotary(1001, 64, 10000.0, CPU)
    torch.set_default_dtype(torch.bfloat16)
    try:
        rope = Rotary(1001, 64, 10000.0, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rope.cos, exact.cos)
    assert torch.equal(rope.sin[1000], exact.sin[1000])
    assert (exact.cos[1000, 0].double() - torch.tensor(1000.0, dtype=torch.float64).cos()).abs() < 1e-6
