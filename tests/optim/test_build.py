"""Each optimizer's step against its formula, on a known gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.optim.build import build_optimizer
from lit_stable.optim.options import OptimizerOptions, PatternOptions

LR = 0.1


def one_weight(weight: float, gradient: float, **options) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    linear = nn.Linear(1, 1, bias=False)
    linear.weight.data.fill_(weight)
    linear.weight.grad = torch.full((1, 1), gradient)
    return build_optimizer(linear, OptimizerOptions(**options), LR), linear.weight


def step(weight: float, gradient: float, **options) -> float:
    optimizer, parameter = one_weight(weight, gradient, **options)
    optimizer.step()
    return parameter.item()


def test_adamw_takes_decay_from_the_weight():
    assert step(2.0, 0.5) == pytest.approx(2.0 * (1 - LR * 0.1) - LR * 0.5 / (0.5 + 1e-8))


def test_adam_puts_decay_into_the_gradient():
    # A first step of Adam has the size of the rate whatever the gradient, so decay shows in its direction.
    assert step(2.0, 0.0, name="adam") == pytest.approx(2.0 - LR)
    assert step(2.0, -0.1, name="adam") == pytest.approx(2.0 - LR)  # -0.1 + 0.1 * 2 > 0


def test_sgd_and_its_momentum():
    assert step(2.0, 0.5, name="sgd") == pytest.approx(2.0 - LR * (0.5 + 0.1 * 2.0))
    optimizer, weight = one_weight(2.0, 0.5, name="sgd", momentum=0.9, weight_decay=0.0)
    optimizer.step()
    optimizer.step()
    assert weight.item() == pytest.approx(2.0 - LR * 0.5 - LR * (0.9 * 0.5 + 0.5))


def test_betas_reach_the_moments():
    optimizer, weight = one_weight(1.0, 0.5, betas=(0.8, 0.98))
    optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg"].item() == pytest.approx(0.2 * 0.5)
    assert state["exp_avg_sq"].item() == pytest.approx(0.02 * 0.25)


def test_eps_reaches_the_step():
    steps = [1.0 - step(1.0, 1e-7, eps=eps, weight_decay=0.0) for eps in (1e-8, 1e-6)]
    assert steps == pytest.approx([LR * 1e-7 / (1e-7 + eps) for eps in (1e-8, 1e-6)], rel=1e-4)


def test_adam_without_memory_and_with_a_large_eps_is_nearly_sgd():
    # OPT's "SGD-like Adam": beta1 = 0, eps = 1.
    assert 1.0 - step(1.0, 0.01, betas=(0.0, 0.95), eps=1.0, weight_decay=0.0) == pytest.approx(LR * 0.01, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"name": "adam"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9}])
def test_nothing_moves_at_rate_0_without_gradients(options):
    optimizer, weight = one_weight(2.0, 0.0, **options)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert weight.item() == 2.0


@pytest.mark.parametrize(("name", "momentum", "fused"), [("adamw", 0, True), ("adam", 0, True), ("sgd", 0.9, False)])
def test_adam_is_fused_and_state_is_left_to_who_may_keep_it_otherwise(name, momentum, fused):
    optimizer, _ = one_weight(2.0, 0.5, name=name, momentum=momentum)
    assert not optimizer.state
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [fused]


def test_rates_of_patterns_are_multiples():
    config = GPTConfig(vocab_size=10, n_layer=2, n_head=2, d_model=8, max_length=4)
    gpt = GPT(config)
    options = OptimizerOptions(patterns={"wte.*": PatternOptions(lr_factor=0.1)})
    rates = {group["name"]: group["lr"] for group in build_optimizer(gpt, options, LR).param_groups}
    assert rates == {"weights": LR, "embeddings": LR, "embeddings of wte.*": pytest.approx(0.01), "norms": LR}


@pytest.mark.parametrize(("gain", "limit"), [("one", 0.0), ("zero_centred", 1.0)])
def test_decayed_gains_go_to_0_or_to_1_by_how_they_are_stored(gain, limit):
    config = GPTConfig(vocab_size=10, n_layer=1, n_head=2, d_model=8, max_length=4, norm_gain=gain, bias=True)
    gpt = GPT(config)
    initialise(gpt, 0)
    norm, start = gpt.blocks[0].mlp_norm, 1.5
    norm.weight.data.fill_(start - (gain == "zero_centred"))
    norm.bias.data.fill_(0.3)
    optimizer = build_optimizer(gpt, OptimizerOptions(decay_norms=True), LR)
    for parameter in gpt.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(20):
        optimizer.step()
    gains = norm.weight + (gain == "zero_centred")
    torch.testing.assert_close(gains, torch.full((8,), limit + (start - limit) * (1 - LR * 0.1) ** 20))
    assert torch.equal(norm.bias, torch.full((8,), 0.3))


def test_bloombergs_gain_after_12k_steps_is_the_golden_value():
    optimizer, weight = one_weight(1.0, 0.0)
    optimizer.param_groups[0]["lr"] = 1e-4
    for _ in range(1200):
        optimizer.step()
    assert weight.item() ** 10 == pytest.approx(0.887, abs=1e-3)
    assert weight.item() == pytest.approx(math.exp(-1200e-5), rel=1e-4)
