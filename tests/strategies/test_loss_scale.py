"""The loss scale: how it moves, what it looks at, what a checkpoint keeps of it."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

from lit_stable.strategies.loss_scale import LossScale, LossScaler


def run(policy: LossScale, overflows: str, scaler: LossScaler | None = None) -> list[float]:
    """The scale after each step of a string such as ``..x.``: ``x`` overflows."""
    scaler = scaler or LossScaler(policy, "cpu")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for sign in overflows:
        scaler.scale(torch.ones(()))
        weight.grad = torch.full((2,), math.inf if sign == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    ("policy", "overflows", "scales"),
    [
        # OPT-175B begins low and doubles often.
        (LossScale(init=4, window=3, floor=2**-5), "......x.", [4, 4, 8, 8, 8, 16, 8, 8]),
        (LossScale(init=8, window=2, floor=1), "x.x..", [4, 4, 2, 2, 4]),
        # Two overflows before it halves; after that each halves it, until it has doubled again.
        (LossScale(init=8, window=3, hysteresis=2, floor=1), "x.x..x...x.x", [8, 8, 4, 4, 4, 2, 2, 2, 4, 4, 4, 2]),
        (LossScale(init=8, window=9, hysteresis=3, floor=4), "xxxxx", [8, 8, 4, 4, 4]),
        (LossScale(init=8, window=9, floor=3), "xx", [4, 3]),
    ],
)
def test_the_scale_moves_by_the_policy(policy, overflows, scales):
    assert run(policy, overflows) == scales


def test_without_hysteresis_it_moves_as_torchs_own_scaler():
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    ours = LossScaler(LossScale(init=64.0, window=3), "cpu")
    steps = "..x....xx...." * 3
    assert run(LossScale(), steps, ours) == run(LossScale(), steps, theirs)


def test_an_overflow_at_the_floor_is_noted_once_the_hysteresis_is_used_up():
    scaler = LossScaler(LossScale(init=1.0, window=5, hysteresis=2, floor=1.0), "cpu")
    assert scaler.exhausted is None
    noted = []
    for sign in ".x.x..":
        run(LossScale(), sign, scaler)
        noted.append(bool(scaler.exhausted))
    assert noted == [False, False, False, True, True, True]


def test_a_scale_stays_finite():
    assert run(LossScale(init=2.0**126, window=1), "...") == [2.0**127, 2.0**127, 2.0**127]


@pytest.mark.parametrize("kernel", [{"fused": True}, {"fused": False}])
def test_gradients_are_unscaled_and_an_overflow_changes_nothing(kernel):
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, eps=1.0, weight_decay=0.0, **kernel)
    scaler = LossScaler(LossScale(init=1024.0), "cpu")
    for factor in (1.0, math.inf, math.nan):
        before = [w.detach().clone() for w in weights]
        scaler.scale(torch.ones(()))
        for weight in weights:
            weight.grad = torch.full_like(weight, 1024.0)
        weights[1].grad[2] *= factor
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(w, old) for w, old in zip(weights, before, strict=True)]
        assert moved == ([True, True, False] if factor == 1.0 else [False, False, False])
    # eps of 1 lets the size of the gradient show: Adam's first step is lr * g / (|g| + eps).
    torch.testing.assert_close(weights[0].detach(), torch.full((3,), 1.0 - 0.1 * 0.5))


def test_a_state_resumes_the_policys_course():
    policy = LossScale(init=16, window=4, hysteresis=2, floor=1)
    steps = "..x...x.x......x.xx"
    straight = run(policy, steps)
    for cut in range(len(steps)):
        first, second = LossScaler(policy, "cpu"), LossScaler(policy, "cpu")
        run(policy, steps[:cut], first)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert run(policy, steps[cut:], second) == straight[cut:]


def test_a_load_in_mid_run_takes_hold():
    policy = LossScale(init=16, window=4, hysteresis=2, floor=1)
    scaler = LossScaler(policy, "cpu")
    state = scaler.state_dict()
    run(policy, "xxx", scaler)
    scaler.load_state_dict(state)
    assert run(policy, "x.x", scaler) == run(policy, "x.x")


def test_the_policy_comes_from_the_recipe_and_not_from_the_checkpoint():
    stored = LossScaler(LossScale(init=2.0, window=7, hysteresis=5), "cpu").state_dict()
    scaler = LossScaler(LossScale(init=64.0, window=2, hysteresis=1, floor=4.0), "cpu")
    scaler.load_state_dict(stored)
    assert run(LossScale(), "..x", scaler) == [4.0, 8.0, 4.0]


def test_a_state_of_torchs_own_scaler_loads():
    theirs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
    run(LossScale(), ".", theirs)
    scaler = LossScaler(LossScale(window=2), "cpu")
    scaler.load_state_dict(theirs.state_dict())
    assert run(LossScale(), "..", scaler) == [64.0, 64.0]


def test_one_like_torchs_begins_alike_and_agrees_over_ranks():
    scaler = LossScaler.like(torch.amp.GradScaler("cpu", init_scale=0.5, growth_interval=3), "cpu")
    assert scaler.policy == LossScale(init=0.5, window=3, floor=0.5)
    assert scaler.over_ranks
    ours = LossScaler(LossScale(init=4.0), "cpu")
    assert LossScaler.like(ours, "cpu") is ours
    assert ours.over_ranks


def test_at_a_threshold_it_stays_and_ends_nothing():
    scaler = LossScaler(LossScale(init=1.0, window=2, floor=2**-5, threshold=0.25), "cpu")
    assert run(LossScale(), "xxxxx..x", scaler) == [0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.5, 0.25]
    assert not scaler.exhausted
    scaler.load_state_dict({**scaler.state_dict(), "scale": 0.125})  # of a run without one
    assert scaler.get_scale() == 0.25


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"threshold": 0.5},
            r"loss_scale\.threshold=0\.5: must lie between loss_scale\.floor=1\.0 and loss_scale\.init",
        ),
        ({"threshold": math.nan}, r"loss_scale\.threshold=nan: must lie between"),
        ({"window": 0}, r"loss_scale\.window=0: must be at least 1\."),
        ({"hysteresis": 0}, r"loss_scale\.hysteresis=0: must be at least 1\."),
        ({"floor": 0.0}, r"loss_scale\.floor=0\.0: must be a finite number above 0\."),
        ({"floor": math.nan}, r"loss_scale\.floor=nan: must be a finite number above 0\."),
        ({"init": 0.5}, r"loss_scale\.init=0\.5: must be finite and at least loss_scale\.floor=1\.0\."),
        ({"init": math.inf}, r"loss_scale\.init=inf: must be finite"),
    ],
)
def test_a_policy_out_of_range_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        LossScale(**options)


def test_all_problems_of_a_policy_come_together():
    with pytest.raises(ValueError, match=r"window=0.*\n.*hysteresis=-1.*\n.*init=0\.5"):
        LossScale(window=0, hysteresis=-1, init=0.5)
