from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import SaveAtSteps, TinyData, TinyModule, adamw, assert_same_bits, quiet_trainer, snapshot
from torch import nn

from lit_stable.callbacks import SafeCheckpoints
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.optimizer_state import initialise_state, step_count, zero_state

KINDS = [{"fused": True}, {"foreach": True}, {"foreach": False}, {"fused": True, "amsgrad": True}, {"amsgrad": True}]
every_kind = pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(k for k, v in o.items() if v) or "loop")


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(3, 5, dtype=dtype)), nn.Parameter(torch.randn(4, 6, dtype=dtype).t())]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def step_with_nothing(optimizer: Any) -> None:
    """Have torch create its state, inside a step that moves nothing: no rate, no gradient, and no step counted."""
    (group,) = optimizer.param_groups
    rate, group["lr"] = group["lr"], 0.0
    gradients = [p.grad for p in group["params"]]
    for parameter in group["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    group["lr"] = rate
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient
        optimizer.state[parameter]["step"].zero_()


@every_kind
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW], ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_is_what_torch_makes_itself(cls: Any, options: dict[str, bool], dtype: torch.dtype) -> None:
    ours, torchs = cls(parameters(dtype), **options), cls(parameters(dtype), **options)
    initialise_state(ours)
    step_with_nothing(torchs)
    for left, right in zip(ours.state.values(), torchs.state.values(), strict=True):
        assert list(left) == list(right)
        for key in left:
            assert (left[key].device, left[key].stride()) == (right[key].device, right[key].stride()), key
        assert_same_bits(dict(left), dict(right))
    for optimizer in (ours, torchs):
        optimizer.step()
    assert_same_bits(list(ours.param_groups[0]["params"]), list(torchs.param_groups[0]["params"]))
    assert_same_bits(ours.state_dict()["state"], torchs.state_dict()["state"])


def test_state_that_exists_is_kept() -> None:
    optimizer = torch.optim.AdamW(parameters(torch.float32))
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[optimizer.param_groups[0]["params"][0]].items()}
    initialise_state(optimizer)
    assert_same_bits(dict(optimizer.state[optimizer.param_groups[0]["params"][0]]), before)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"nesterov": True}])
def test_momentum_starts_as_torch_starts_it(options: dict[str, bool]) -> None:
    ours, torchs = (torch.optim.SGD(parameters(torch.float32), 0.1, momentum=0.9, **options) for _ in range(2))
    initialise_state(ours)
    assert [list(state) for state in ours.state.values()] == 2 * [["momentum_buffer"]]
    for _ in range(2):
        ours.step()
        torchs.step()
    assert_same_bits(list(ours.param_groups[0]["params"]), list(torchs.param_groups[0]["params"]))
    assert_same_bits(ours.state_dict()["state"], torchs.state_dict()["state"])


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD(parameters(torch.float32), 0.1),
        torch.optim.SGD(parameters(torch.float32), 0.1, momentum=0.9, dampening=0.5),
        torch.optim.RMSprop(parameters(torch.float32)),
    ],
    ids=["no momentum", "dampening", "RMSprop"],
)
def test_other_optimizers_are_left_alone(optimizer: Any) -> None:
    initialise_state(optimizer)
    assert not optimizer.state


def test_the_step_count_is_the_largest() -> None:
    optimizer = torch.optim.AdamW(parameters(torch.float32))
    assert step_count(optimizer) is None
    initialise_state(optimizer)
    optimizer.param_groups[0]["params"][0].grad = None
    optimizer.step()
    optimizer.step()
    assert step_count(optimizer) == 2


@every_kind
def test_zeroed_state_is_that_of_the_beginning_and_the_rest_keeps_its_own(options: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW(parameters(torch.float32), **options)
    first, second = optimizer.param_groups[0]["params"][:2]
    optimizer.step()
    kept = {k: v.clone() for k, v in optimizer.state[second].items()}
    zero_state(optimizer, [first])
    fresh = torch.optim.AdamW(optimizer.param_groups[0]["params"], **options)
    initialise_state(fresh)
    assert_same_bits(dict(optimizer.state[first]), dict(fresh.state[first]))
    assert_same_bits(dict(optimizer.state[second]), kept)


def test_zeroing_knows_counts_that_are_numbers_and_parameters_without_state() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, other], lr=0.1, momentum=0.9)
    optimizer.state[weight] = {"step": 3, "momentum_buffer": torch.ones(2)}
    zero_state(optimizer, [weight, other])
    assert_same_bits(dict(optimizer.state[weight]), {"step": 0, "momentum_buffer": torch.zeros(2)})
    assert other not in optimizer.state


def test_state_whose_zero_is_not_known_is_refused_before_anything_changes() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, other], lr=0.1)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(2)}
    optimizer.state[other] = {"row_var": torch.ones(1)}
    with pytest.raises(MisconfigurationException, match=r"SGD keeps row_var, which may not be zero in a new optimizer"):
        zero_state(optimizer)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.ones(2))
    zero_state(optimizer, [weight])


def test_states_of_bitsandbytes_are_those_of_a_new_one_after_it() -> None:
    """Codes too: a new one begins with zero codes and zero maxima, and every code then stands for zero."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.ones(4096))
    optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=0.1)
    weight.grad = torch.randn(4096)
    optimizer.step()
    assert optimizer.state[weight]["state1"].dtype == torch.uint8
    zero_state(optimizer)
    fresh = bitsandbytes.optim.AdamW8bit([weight], lr=0.1)
    fresh.init_state(fresh.param_groups[0], weight, 0, 0)
    assert_same_bits(dict(optimizer.state[weight]), dict(fresh.state[weight]))


@every_kind
def test_saving_before_the_first_step_changes_nothing(options: dict[str, bool], tmp_path: Path) -> None:
    runs = []
    for savers in ([], [SaveAtSteps(tmp_path)]):
        trainer = quiet_trainer(SafeCheckpoints(), *savers, max_steps=3)
        trainer.fit(TinyModule(adamw(**{"fused": False, **options})), TinyData())
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])
    saved = torch.load(tmp_path / "start.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert [float(s["step"]) for s in saved.values()] == [0.0] * 4


def test_a_parameter_that_never_had_a_gradient_has_state_to_save() -> None:
    class Unused(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    trainer = quiet_trainer(SafeCheckpoints(), max_steps=2)
    trainer.fit(module := Unused(), TinyData())
    assert float(trainer.optimizers[0].state[module.unused]["step"]) == 0.0
    assert torch.equal(module.unused, torch.ones(2))


def test_the_step_count_lies_beside_the_parameter_only_where_a_kernel_reads_it_there() -> None:
    for options, device in (({"fused": False}, "cpu"), ({"capturable": True}, "meta")):
        weight = nn.Parameter(torch.empty(2, device="meta"))
        optimizer = torch.optim.AdamW([weight], **options)
        initialise_state(optimizer)
        assert optimizer.state[weight]["step"].device.type == device
    optimizer.state.clear()
    optimizer.param_groups[0].update(capturable=False, fused=True)  # fused kernels refuse the meta device at birth
    initialise_state(optimizer)
    assert optimizer.state[weight]["step"].device.type == "meta"
