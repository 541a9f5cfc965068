"""Adam and AdamW turned into 8 bit in place, without a Trainer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from eight_bit_models import OPTIONS, Kinds, converted, give_gradients, planned, train, whole_states
from tiny_fit import assert_same_bits
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_blocks import require_bitsandbytes
from lit_stable.callbacks.eight_bit_conversion import convert_in_place, convertible
from lit_stable.callbacks.eight_bit_optimizer import BlockwiseAdamW, is_blockwise
from lit_stable.callbacks.eight_bit_states import bits_of, fresh_state

require_bitsandbytes()


def convert(optimizer: Any, module: nn.Module) -> Any:
    convert_in_place(optimizer, planned(module), torch.device("cpu"))
    return optimizer


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"foreach": False}, {}], ids=str)
def test_it_stays_the_same_object_with_the_same_groups_and_counts_as_fused(kind: dict[str, bool]) -> None:
    model = Kinds()
    optimizer = AdamW([{"params": model.parameters(), "name": "all"}], lr=0.1, eps=1e-6, weight_decay=0.3, **kind)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    before = dict(group)
    convert(optimizer, model)
    assert optimizer.param_groups is groups
    assert groups[0] is group
    changed = {key for key in group.keys() | before.keys() if group.get(key) != before.get(key)}
    assert changed <= {"fused", "foreach", "state_map"}
    assert (group["fused"], group["foreach"], group["state_map"]) == (True, False, "dynamic")
    assert (type(optimizer), isinstance(optimizer, AdamW), is_blockwise(optimizer)) == (BlockwiseAdamW, True, True)


def test_every_parameter_has_its_state_before_the_first_step() -> None:
    model = Kinds()
    states = whole_states(model, converted(model))
    assert {name: bits_of(state) for name, state in states.items()} == {
        **dict.fromkeys(["experts", "even.weight", "odd.weight", "short.weight", "one.weight"], 8),
        **dict.fromkeys(["embedding.weight", "even.bias", "norm.weight", "norm.bias"], 32),
    }


def test_the_schedulers_pin_and_the_hooks_hold() -> None:
    """A plain class swap does nothing here: the scheduler pinned the old class's step on the instance."""
    model, calls = Kinds(), []
    optimizer = AdamW(model.parameters(), **OPTIONS)
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer, 0.5, total_iters=2), ConstantLR(optimizer, 1.0)], [2])
    optimizer.register_step_pre_hook(lambda *rest: calls.append("before"))
    convert(optimizer, model)
    optimizer.register_step_post_hook(lambda *rest: calls.append("after"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the scheduler steps before the optimizer, or that its step was replaced
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
            scheduler.step()
    assert calls == ["before", "after"] * 3
    assert optimizer.state[model.odd.weight]["exp_avg_codes"].any()
    assert float(optimizer.state[model.odd.weight]["step"]) == 3.0


def test_another_optimizer_of_the_class_is_converted_too_and_plain_ones_stay() -> None:
    first, second, third = Kinds(), Kinds(), Kinds()
    counts = []
    for model in (first, second):
        optimizer = converted(model)
        optimizer.register_step_post_hook(lambda *rest: counts.append(1))
        train(model, optimizer, steps=1)
    assert len(counts) == 2
    plain = AdamW(third.parameters(), **OPTIONS)
    give_gradients(third, 0)
    plain.step()
    assert (type(plain), set(plain.state[third.odd.weight])) == (AdamW, {"step", "exp_avg", "exp_avg_sq"})


def test_what_it_has_learned_is_converted_and_what_it_has_not_is_fresh() -> None:
    model = Kinds()
    optimizer = AdamW(model.parameters(), **OPTIONS)
    give_gradients(model, 0)
    model.even.weight.grad = None
    optimizer.step()
    convert(optimizer, model)
    assert float(optimizer.state[model.odd.weight]["step"]) == 1.0
    assert optimizer.state[model.odd.weight]["exp_avg_absmax"].all()
    assert_same_bits(dict(optimizer.state[model.even.weight]), fresh_state(model.even.weight, 8))


@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_options_without_such_a_step_are_refused(name: str) -> None:
    model = Kinds()
    with pytest.raises(MisconfigurationException, match=rf"`Adam\({name}=True\)`: `EightBitAdam` has no such step"):
        convert(AdamW(model.parameters(), **{name: True}), model)


def test_parameters_that_cannot_be_stepped_on_are_refused_by_name() -> None:
    model = Kinds().double()
    with pytest.raises(MisconfigurationException, match=r"experts is torch.float64; it steps on float32, bfloat16"):
        convert(AdamW(model.parameters()), model)
    model = Kinds()
    with pytest.raises(
        MisconfigurationException, match=r"experts lies on cpu while the run is on cuda; .* CPU offload"
    ):
        convert_in_place(AdamW(model.parameters()), planned(model), torch.device("cuda"))


def test_a_step_that_something_else_replaced_on_the_instance_is_refused() -> None:
    model = Kinds()
    optimizer = AdamW(model.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    with pytest.raises(MisconfigurationException, match=r"`AdamW.step`: something has replaced it on the instance"):
        convert(optimizer, model)


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = converted(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(MisconfigurationException, match=r"a gradient is sparse, .* sparse=False"):
        optimizer.step()


def test_only_torchs_own_adam_and_adamw_can_be_converted() -> None:
    class Mine(AdamW):
        pass

    parameters = [nn.Parameter(torch.ones(1))]
    kinds = [Adam(parameters), AdamW(parameters), Mine(parameters), torch.optim.SGD(parameters, 0.1)]
    assert [convertible(optimizer) for optimizer in kinds] == [True, True, False, False]
