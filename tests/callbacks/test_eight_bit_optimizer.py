"""Steps and loads of the 8-bit Adam and AdamW, without a Trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from eight_bit_models import OPTIONS, Kinds, converted, differing, give_gradients, planned, train, whole_states
from tiny_fit import assert_same_bits
from torch import nn
from torch.optim import Adam, AdamW

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_blocks import require_bitsandbytes
from lit_stable.callbacks.eight_bit_conversion import convert_in_place
from lit_stable.callbacks.eight_bit_optimizer import (
    BlockwiseAdam,
    BlockwiseAdamW,
)
from lit_stable.callbacks.eight_bit_states import bits_of, fresh_state

require_bitsandbytes()
CPU = torch.device("cpu")


def convert(optimizer: Any, module: nn.Module, **options: Any) -> Any:
    convert_in_place(optimizer, planned(module, **options), CPU)
    return optimizer


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Adam, AdamW], ids=lambda c: c.__name__)
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"lr": torch.tensor(0.01)}], ids=str)
def test_with_all_moments_in_32_bit_it_is_torchs_fused_optimizer_bit_for_bit(cls: Any, options: Any) -> None:
    """Decay coupled or not, the other direction, a rate in a tensor, a skip, a division."""
    ours, theirs = Kinds(), Kinds()
    kind = {Adam: BlockwiseAdam, AdamW: BlockwiseAdamW}[cls]
    optimizer = converted(ours, cls, planned(ours, bits=32), **options)
    fused = cls(theirs.parameters(), **{**OPTIONS, **options}, fused=True)
    train(ours, optimizer)
    train(theirs, fused)
    assert type(optimizer) is kind
    assert not differing(weights(ours), weights(theirs))
    assert not differing(whole_states(ours, optimizer), whole_states(theirs, fused))


@pytest.mark.parametrize("cls", [Adam, AdamW], ids=lambda c: c.__name__)
def test_in_8_bit_weights_stay_near_those_of_32_bit(cls: Any) -> None:
    ours, theirs = Kinds(), Kinds()
    train(ours, converted(ours, cls))
    train(theirs, cls(theirs.parameters(), **OPTIONS, fused=True))
    for name, weight in weights(theirs).items():
        apart = (weights(ours)[name] - weight).abs().mean() / OPTIONS["lr"]
        assert apart < 0.05, name  # of the step of one update
        assert apart > 0 or bits_of(fresh_state(weight, 32)) == 32


@pytest.mark.parametrize("step", [0, 3])
def test_a_skipped_step_leaves_weights_moments_and_counts_and_the_next_is_as_if_it_had_not_been(step: int) -> None:
    skipping, straight = Kinds(), Kinds()
    optimizers = converted(skipping), converted(straight)
    for model, optimizer in zip((skipping, straight), optimizers, strict=True):
        for number in range(step):
            give_gradients(model, number)
            optimizer.step()
    before = weights(skipping), whole_states(skipping, optimizers[0])
    give_gradients(skipping, 99, scale=math.nan)
    optimizers[0].found_inf = torch.ones(())
    optimizers[0].step()
    assert not differing(weights(skipping), before[0])
    assert not differing(whole_states(skipping, optimizers[0]), before[1])
    optimizers[0].found_inf = torch.zeros(())
    for model, optimizer in zip((skipping, straight), optimizers, strict=True):
        give_gradients(model, step)
        optimizer.step()
    assert not differing(weights(skipping), weights(straight))
    assert not differing(whole_states(skipping, optimizers[0]), whole_states(straight, optimizers[1]))


def test_at_rate_0_and_without_gradients_nothing_moves() -> None:
    model = Kinds()
    optimizer = converted(model, lr=0.0)
    before = weights(model)
    give_gradients(model, 0, scale=0.0)
    optimizer.step()
    assert not differing(weights(model), before)
    assert not optimizer.state[model.odd.weight]["exp_avg_absmax"].any()
    optimizer.zero_grad()
    optimizer.step()
    assert float(optimizer.state[model.odd.weight]["step"]) == 1.0


def test_a_closure_is_called_once_with_gradients_on() -> None:
    model = Kinds()
    optimizer, calls = converted(model), []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model.even(torch.ones(1, 512)).sum()
        loss.backward()
        return loss.detach()

    expected = Kinds().even(torch.ones(1, 512)).sum().detach()
    assert torch.equal(optimizer.step(closure), expected)
    assert calls == [True]


def test_groups_keep_their_own_decay_rates_of_moments_and_decay() -> None:
    """As torch's fused AdamW with the same groups, in 32 bit."""
    options = ({"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.5}, {"betas": (0.9, 0.99), "weight_decay": 0.0})
    models = [Kinds(), Kinds()]
    for model, converts in zip(models, (False, True), strict=True):
        groups = [{"params": [p], **o} for p, o in zip((model.even.weight, model.odd.weight), options, strict=True)]
        optimizer: Any = AdamW(groups, lr=0.1, fused=True)
        if converts:
            convert(optimizer, model, min_8bit_size=1 << 30)
        train(model, optimizer, steps=3)
    assert differing(weights(models[1]), weights(models[0])) == []


def test_groups_keep_their_own_options() -> None:
    model = Kinds()
    optimizer = AdamW([{"params": [model.even.weight], "lr": 0.0}, {"params": [model.odd.weight], "lr": 0.1}])
    convert(optimizer, model)
    before = weights(model)
    train(model, optimizer, steps=2)
    assert differing(weights(model), before) == ["odd.weight"]


def test_a_group_that_is_added_later_follows_the_plan() -> None:
    model = Kinds()
    optimizer = convert(AdamW([model.even.weight]), model)
    optimizer.add_param_group({"params": [model.odd.weight, model.embedding.weight]})
    train(model, optimizer, steps=1)
    assert [bits_of(optimizer.state[p]) for p in (model.odd.weight, model.embedding.weight)] == [8, 32]
    first, added = optimizer.param_groups
    assert first.keys() == added.keys()
    assert (added["state_map"], added["fused"]) == ("dynamic", True), "what its codes stand for, and who may skip it"


def test_a_step_count_that_is_lost_restarts_bias_correction() -> None:
    """sqrt(1 - beta2) / (1 - beta1) = 2.236 for (0.9, 0.95), so the count belongs into every checkpoint."""
    weight = nn.Parameter(torch.zeros(1, 256))
    optimizer = converted(nn.ParameterList([weight]), lr=1.0, weight_decay=0.0)
    moved = []
    for step in range(201):
        if step == 200:
            optimizer.state[weight]["step"].zero_()
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved.append(float((before - weight).abs().max()))
    assert moved[199] == pytest.approx(1.0, rel=1e-3)
    assert moved[200] == pytest.approx(math.sqrt(1 - 0.95) / (1 - 0.9), rel=1e-3)


def test_the_linear_map_moves_weights_otherwise() -> None:
    dynamic, linear = Kinds(), Kinds()
    train(dynamic, converted(dynamic))
    train(linear, converted(linear, plan=planned(linear, state_map="linear")))
    assert differing(weights(linear), weights(dynamic))


# -- loading -----------------------------------------------------------------------------------------------------------


def saved(cls: Any = AdamW, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, dict[str, Any]]:
    """(model, state dict) after some steps, in 8 bit or, with ``plain``, as torch keeps it."""
    plain = options.pop("plain", False)
    model = Kinds().to(dtype)
    optimizer = cls(model.parameters(), **OPTIONS) if plain else converted(model, cls, planned(model, **options))
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    return model, optimizer.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_goes_on_bit_for_bit_from_a_saved_state(dtype: torch.dtype) -> None:
    model, state = saved(dtype=dtype)
    twin = Kinds().to(dtype)
    twin.load_state_dict(model.state_dict())
    optimizer = converted(twin)
    optimizer.load_state_dict(torch.load(_write(state), weights_only=True))
    assert_same_bits(optimizer.state_dict()["state"], state["state"])
    straight, again = Kinds().to(dtype), converted(twin)
    again.load_state_dict(torch.load(_write(state), weights_only=True))
    reference = converted(straight)
    for step in range(3):
        give_gradients(straight, step)
        reference.step()
    train(twin, again, steps=4)
    train(straight, reference, steps=4)
    assert not differing(weights(twin), weights(straight))


def _write(state: dict[str, Any]) -> str:
    torch.save(state, "state.pt")
    return "state.pt"


@pytest.mark.parametrize("rules", [{}, {"bits": 32}], ids=["to 8 bit", "to 32 bit"])
def test_another_form_is_refused_before_anything_changes_or_converted(rules: dict[str, Any]) -> None:
    _, state = saved(plain=not rules)
    model = Kinds()
    optimizer = convert(AdamW(model.parameters()), model, **rules)
    before, found = whole_states(model, optimizer), "32 bit" if not rules else r"8 bit \(dynamic\)"
    with pytest.raises(MisconfigurationException, match=rf"another form than this run, {found} to .*: experts, even.w"):
        optimizer.load_state_dict(state)
    assert not differing(whole_states(model, optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.plan = planned(model, converts=True, **rules)
    optimizer.load_state_dict(state)
    assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}
    assert bits_of(optimizer.state[model.odd.weight]) == rules.get("bits", 8)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["fused"]
    assert ("state_map" in optimizer.param_groups[0]) == (not rules)


def test_a_plain_adamw_reads_what_was_widened() -> None:
    _, state = saved()
    model = Kinds()
    wide = convert(AdamW(model.parameters()), model, bits=32, converts=True)
    wide.load_state_dict(state)
    plain = AdamW(model.parameters())
    plain.load_state_dict(wide.state_dict())
    assert_same_bits(plain.state_dict()["state"], wide.state_dict()["state"])
    assert plain.param_groups[0].keys() == AdamW(model.parameters()).param_groups[0].keys()


def test_codes_of_another_map_are_another_form() -> None:
    _, state = saved(state_map="linear")
    model = Kinds()
    optimizer = convert(AdamW(model.parameters()), model)
    with pytest.raises(MisconfigurationException, match=r"8 bit \(linear\) to 8 bit \(dynamic\): experts"):
        optimizer.load_state_dict(state)
    optimizer.plan = planned(model, converts=True)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["state_map"] == "dynamic"


def test_other_rules_convert_the_tensors_that_differ_alone() -> None:
    _, state = saved()
    model = Kinds()
    optimizer = convert(AdamW(model.parameters()), model, keep_32_bit=("odd",), converts=True)
    optimizer.load_state_dict(state)
    assert bits_of(optimizer.state[model.odd.weight]) == 32
    index = [id(p) for p in model.parameters()].index(id(model.even.weight))
    assert_same_bits(dict(optimizer.state[model.even.weight]), state["state"][index])


def test_states_of_another_optimizer_are_refused() -> None:
    model = Kinds()
    theirs = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    give_gradients(model, 0)
    theirs.step()
    with pytest.raises(MisconfigurationException, match=r"the checkpoint keeps momentum_buffer of a parameter, which"):
        converted(model).load_state_dict(theirs.state_dict())


def test_amsgrad_that_comes_with_a_checkpoint_is_refused() -> None:
    model = Kinds()
    theirs = AdamW(model.parameters(), amsgrad=True)
    give_gradients(model, 0)
    theirs.step()
    optimizer = convert(AdamW(model.parameters()), model, converts=True)
    with pytest.raises(MisconfigurationException, match=r"`Adam\(amsgrad=True\)`"):
        optimizer.load_state_dict(theirs.state_dict())


def test_after_the_fit_without_a_plan_it_goes_on_as_it_stands() -> None:
    model, twin = Kinds(), Kinds()
    optimizer, other = converted(model), converted(twin)
    del optimizer.plan
    train(model, optimizer)
    train(twin, other)
    assert not differing(weights(model), weights(twin))
    optimizer.load_state_dict(other.state_dict())
    assert not differing(whole_states(model, optimizer), whole_states(twin, other))
