from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import (
    AccumulationWindows,
    EffectiveLR,
    Events,
    LROverride,
    OptimizerReset,
    Progress,
    SafeCheckpoints,
)
from lit_stable.callbacks import optimizer_reset as module_under_test
from lit_stable.callbacks.optimizer_reset import largest_state
from lit_stable.callbacks.optimizer_state import zero_state
from lit_stable.callbacks.progress import Mark

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])


class States:
    """Weights and optimizer state before every window and after every step, by step."""

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}
        self.after: dict[int, Any] = {}
        self.watches = [
            Watch("on_before_optimizer_step", lambda t, o: self.before.update({t.global_step: snapshot(t)})),
            Watch("on_train_batch_end", lambda t, *rest: self.after.update({t.global_step: snapshot(t)})),
        ]


def steps_and_moments(state: Any) -> tuple[set[int], float]:
    entries = state["optimizer"].values()
    moments = [e[name].abs().max().item() for e in entries for name in ("exp_avg", "exp_avg_sq")]
    return {int(e["step"]) for e in entries}, max(moments)


@both_kernels
def test_state_is_zero_at_the_step_and_weights_stand_still_while_it_fills(fused: bool) -> None:
    states = States()
    trainer = quiet_trainer(OptimizerReset(start=3, hold_steps=2), *states.watches, max_steps=7)
    trainer.fit(TinyModule(adamw(fused=fused)), TinyData())
    assert steps_and_moments(states.before[2])[0] == {2}
    assert steps_and_moments(states.before[3]) == ({0}, 0.0)
    assert_same_bits(states.after[4]["weights"], states.after[3]["weights"])
    assert_same_bits(states.after[5]["weights"], states.after[3]["weights"])
    assert steps_and_moments(states.after[5])[0] == {2}
    assert steps_and_moments(states.after[5])[1] > 0
    assert not torch.equal(states.after[6]["weights"]["net.0.weight"], states.after[5]["weights"]["net.0.weight"])
    assert steps_and_moments(states.after[7])[0] == {4}


def test_without_a_hold_the_next_step_equals_the_first_of_a_new_optimizer(tmp_path: Path) -> None:
    """Its size is the learning rate for every weight: bias correction restarts together with the moments."""
    module = TinyModule(adamw(weight_decay=0.0, eps=1e-30, lr=0.01))
    states = States()
    quiet_trainer(OptimizerReset(start=3, hold_steps=0), *states.watches, max_steps=4).fit(module, TinyData())
    moved = states.after[4]["weights"]["net.3.weight"] - states.after[3]["weights"]["net.3.weight"]
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01), rtol=1e-3, atol=1e-7)


def test_the_second_moment_fills_as_one_minus_beta2_to_the_n() -> None:
    """The same gradient in each held step: after 100 steps at 0.95 the moment has 0.994 of its weight (row E06)."""

    class SameGradient(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(torch.ones(2, 4)).square().mean()

    module = SameGradient(adamw(betas=(0.9, 0.95)))
    trainer = quiet_trainer(OptimizerReset(start=1, hold_steps=100), max_steps=101, log_every_n_steps=0)
    trainer.fit(module, TinyData())
    weight = module.net[3].weight
    assert weight.grad is not None
    filled = trainer.optimizers[0].state[weight]["exp_avg_sq"] / weight.grad.square()
    torch.testing.assert_close(filled, torch.full_like(filled, 1 - 0.95**100), rtol=1e-4, atol=0)
    assert f"{filled.mean().item():.3f}" == "0.994"


MULTIPLIERS = {  # golden table G4
    0.95: {1: 2.236, 2: 1.643, 3: 1.394, 5: 1.161, 10: 0.973, 20: 0.912, 100: 0.997},
    0.98: {1: 1.414},
    0.999: {1: 0.316, 2: 0.235, 3: 0.202},
}


@pytest.mark.parametrize("beta2", MULTIPLIERS)
def test_a_step_count_that_alone_is_lost_multiplies_updates_by_the_golden_table(beta2: float) -> None:
    """Why the reset takes moments and count together, and what a lost count looks like (row E08)."""
    parameter = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, beta2), eps=0.0, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    one = torch.ones((), dtype=torch.float64)  # moments of a constant gradient after infinitely many steps
    optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": one.clone(), "exp_avg_sq": one.clone()}
    for t in range(1, max(MULTIPLIERS[beta2]) + 1):
        before = parameter.item()
        optimizer.step()
        multiplier = (before - parameter.item()) / 1e-3
        assert multiplier == pytest.approx(math.sqrt(1 - beta2**t) / (1 - 0.9**t), rel=1e-9)
        if t in MULTIPLIERS[beta2]:
            assert multiplier == pytest.approx(MULTIPLIERS[beta2][t], abs=6e-4)


@both_kernels
def test_a_resume_keeps_the_step_count_so_that_the_next_update_is_the_same(fused: bool, tmp_path: Path) -> None:
    straight = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=4)
    straight.fit(TinyModule(adamw(fused=fused)), TinyData())
    first = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=3)
    first.fit(TinyModule(adamw(fused=fused)), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    resumed = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=4)
    resumed.fit(TinyModule(adamw(fused=fused)), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    assert_same_bits(snapshot(resumed), snapshot(straight))


def test_on_resume_it_happens_once_over_three_resumes_and_the_hold_goes_on(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    first = quiet_trainer(AccumulationWindows(4, 2), max_steps=3)
    first.fit(TinyModule(), TinyData())
    first.save_checkpoint(checkpoint)
    weights, counts = [], []
    for stop in (4, 5, 7):
        reset = OptimizerReset(hold_steps=3)
        trainer = quiet_trainer(AccumulationWindows(4, 2), reset, max_steps=stop)
        trainer.fit(TinyModule(), TinyData(), ckpt_path=checkpoint)
        trainer.save_checkpoint(checkpoint)
        weights.append(snapshot(trainer)["weights"])
        counts.append(steps_and_moments(snapshot(trainer))[0])
        assert reset.state_dict()["done"] == [3, 12, 48]
    assert_same_bits(weights[0], snapshot(first)["weights"])
    assert_same_bits(weights[1], weights[0])
    assert not torch.equal(weights[2]["net.0.weight"], weights[1]["net.0.weight"])
    assert counts == [{1}, {2}, {4}]


@pytest.mark.parametrize("name", ["start", "micro-5", "micro-6", "micro-7", "micro-8", "micro-10"])
def test_resumes_bit_for_bit_from_before_within_and_after_the_reset(name: str, tmp_path: Path) -> None:
    def run(*others: Any, resume: Any = None) -> Any:
        trainer = quiet_trainer(
            AccumulationWindows(4, 2), OptimizerReset(start=12, unit="samples", hold_steps=2), *others, max_steps=6
        )
        trainer.fit(TinyModule(), TinyData(), ckpt_path=resume)
        return trainer

    straight = run(SaveAtSteps(tmp_path))
    resumed = run(resume=tmp_path / f"{name}.ckpt")
    assert_same_bits(snapshot(resumed), snapshot(straight))


def test_another_start_is_another_reset(tmp_path: Path) -> None:
    first = quiet_trainer(OptimizerReset(start=1, hold_steps=0), max_steps=3)
    first.fit(TinyModule(), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(OptimizerReset(start=4, hold_steps=0), max_steps=6)
    second.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    assert steps_and_moments(snapshot(second))[0] == {2}


def test_a_run_that_begins_with_it_and_no_start_has_nothing_to_reset_now_or_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(module_under_test, "rank_zero_warn", lines.append)
    for stop, resume in ((2, None), (4, tmp_path / "a.ckpt")):
        trainer = quiet_trainer(OptimizerReset(), max_steps=stop)
        trainer.fit(TinyModule(), TinyData(), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        assert steps_and_moments(snapshot(trainer))[0] == {stop}
    assert lines == ["OptimizerReset: start is not given and nothing was resumed, so nothing is reset."]


def test_the_hold_wins_over_an_override_of_the_rate() -> None:
    rates: list[float] = []
    watch = Watch("on_train_batch_end", lambda t, *rest: rates.append(EffectiveLR.of(t).used["lr"][0]))
    trainer = quiet_trainer(LROverride(schedule=[(0, 0.5)]), OptimizerReset(start=1, hold_steps=2), watch, max_steps=4)
    trainer.fit(TinyModule(), TinyData())
    assert rates == [0.5, 0.0, 0.0, 0.5]


def test_a_reset_that_something_undoes_before_the_step_is_an_error() -> None:
    """Upstream a reset was ignored in silence, and an experiment was void (row E05)."""

    def restore(trainer: Any, batch: Any, batch_idx: int) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg_sq"].fill_(1e-6)

    trainer = quiet_trainer(OptimizerReset(start=2), Watch("on_train_batch_start", restore), max_steps=4)
    with pytest.raises(MisconfigurationException, match="state of AdamW is not zero after the reset"):
        trainer.fit(TinyModule(), TinyData())
    assert trainer.global_step == 2


def test_log_changes_no_bit_and_tells_the_same_event(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("lit_stable.callbacks.events.rank_zero_info", lines.append)
    runs = []
    for callbacks in ([], [OptimizerReset(start=2, hold_steps=2, action="log")]):
        trainer = quiet_trainer(*callbacks, max_steps=4)
        trainer.fit(TinyModule(), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])
    assert lines == [
        "OptimizerReset: would set moments and step counts to zero after 2 steps, 4 samples; learning rate 0 for 2"
        " steps"
    ]


@pytest.mark.parametrize("resumed", [2, 4, 6], ids=["before", "within_the_hold", "behind_it"])
def test_a_reset_that_was_only_logged_is_done_by_a_resume_that_acts(resumed: int, tmp_path: Path) -> None:
    """As one is that the checkpoint does not know of: at `start`, or behind it at the first step."""

    def run(action: Any, resume: Any, *others: Any) -> Any:
        reset = [] if action is None else [OptimizerReset(start=3, hold_steps=2, action=action)]
        trainer = quiet_trainer(*reset, *others, max_steps=6 if resume is None else 10)
        trainer.fit(TinyModule(), TinyData(), ckpt_path=resume)
        return trainer

    run("log", None, Progress(), SaveAtSteps(tmp_path / "told"))
    run(None, None, Progress(), SaveAtSteps(tmp_path / "unknown"))
    states, told = States(), []
    hear = Watch("on_train_start", lambda t: Events.of(t).listeners.update(test=told.append))
    acting = run("act", tmp_path / "told" / f"micro-{resumed}.ckpt", *states.watches, hear)
    at = max(3, resumed)
    assert steps_and_moments(states.before[at]) == ({0}, 0.0)
    assert_same_bits(states.after[at + 2]["weights"], states.before[at]["weights"])
    assert [(event.step, event.evidence["acted"]) for event in told] == [(at + 1, True)]
    assert_same_bits(snapshot(acting), snapshot(run("act", tmp_path / "unknown" / f"micro-{resumed}.ckpt")))


def test_a_reset_that_was_done_stays_done_over_a_resume_that_logs(tmp_path: Path) -> None:
    for action, stop, resume in (("act", 4, None), ("log", 6, "a"), ("act", 8, "b")):
        trainer = quiet_trainer(OptimizerReset(start=2, hold_steps=1, action=action), max_steps=stop)  # type: ignore[arg-type]
        trainer.fit(TinyModule(), TinyData(), ckpt_path=resume and tmp_path / resume)
        trainer.save_checkpoint(tmp_path / ("b" if resume else "a"))
    assert steps_and_moments(snapshot(trainer))[0] == {6}


def test_a_state_that_does_not_tell_logged_from_done_means_done() -> None:
    first, second = OptimizerReset(start=2), OptimizerReset(start=2)
    first.done = Mark(2, 4, 16)
    state = first.state_dict()
    del state["acted"]
    second.load_state_dict(state)
    assert second.state_dict() == {**state, "acted": True}


def test_logs_which_steps_are_held(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(OptimizerReset(start=1, hold_steps=2), logger=logger, log_every_n_steps=1, max_steps=4)
    trainer.fit(TinyModule(), TinyData())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    column = header.split(",").index("stability/optimizer_held")
    assert [float(row.split(",")[column]) for row in rows] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p, 0.1),
        lambda p: torch.optim.Adamax(p, 0.1),
    ],
)
def test_other_optimizers_of_torch_are_reset_too(make: Any) -> None:
    states = States()
    trainer = quiet_trainer(OptimizerReset(start=2, hold_steps=1), *states.watches, max_steps=3)
    trainer.fit(TinyModule(make), TinyData())
    values = [v for entry in states.before[2]["optimizer"].values() for v in entry.values() if v is not None]
    assert all(float(torch.as_tensor(v).abs().max()) == 0.0 for v in values)
    assert_same_bits(states.after[3]["weights"], states.after[2]["weights"])


def test_a_nan_in_the_moments_is_reset_and_would_be_seen() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": torch.full((3,), math.nan)}
    assert math.isnan(largest_state(optimizer))
    zero_state(optimizer)
    assert largest_state(optimizer) == 0.0


def test_an_optimizer_without_moments_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="SGD keeps no moments to reset; leave the callback out"):
        quiet_trainer(OptimizerReset(start=1), max_steps=3).fit(
            TinyModule(lambda p: torch.optim.SGD(p, 0.1)), TinyData()
        )


def test_state_that_need_not_be_zero_in_a_new_optimizer_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"ASGD keeps ax, eta, mu, which may not be zero"):
        quiet_trainer(OptimizerReset(start=1), max_steps=3).fit(
            TinyModule(lambda p: torch.optim.ASGD(p, 0.1)), TinyData()
        )


@pytest.mark.parametrize("name", ["start", "hold_steps"])
def test_negative_arguments_are_refused(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`OptimizerReset\({name}=-1\)`: must be 0 or more"):
        OptimizerReset(**{name: -1})


def test_a_reset_before_the_first_step_finds_nothing_and_goes_on() -> None:
    trainer = quiet_trainer(OptimizerReset(start=0, hold_steps=1), max_steps=2)
    trainer.fit(TinyModule(), TinyData())
    assert steps_and_moments(snapshot(trainer))[0] == {2}
