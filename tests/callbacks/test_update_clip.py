from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import GradClip, GradSpikeSkip, LROverride, Progress, UpdateClip
from lit_stable.callbacks.adam_update import AdamUpdate

KERNELS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "looped": {"foreach": False}}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
pytestmark = pytest.mark.filterwarnings("ignore:GradSpikeSkip")

BETAS = (0.9, 0.95)


def stable(kernel: dict[str, Any], **options: Any) -> Any:
    return adamw(**{"lr": 0.02, "betas": BETAS, "fused": None, **kernel, **options})


class ByHand(TinyModule):
    """StableAdamW in the module's own words: what its AdamW did is replaced after each step."""

    def __init__(self, *args: Any, threshold: float = 1.0, max_norm: float = math.inf, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threshold, self.max_norm = threshold, max_norm
        self.largest: list[float] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        before = [p.detach().clone() for p in self.parameters()]
        optimizer_closure()
        norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm().item()
        for parameter in self.parameters():
            parameter.grad /= max(1.0, norm / self.max_norm)
        optimizer.step()
        (group,) = optimizer.param_groups
        rms = []
        for old, parameter in zip(before, self.parameters(), strict=True):
            state = optimizer.optimizer.state[parameter]
            v = state["exp_avg_sq"] / (1 - BETAS[1] ** state["step"].item())
            rms.append((parameter.grad**2 / v.clamp(min=1e-16)).mean().sqrt().item())
            update = state["exp_avg"] / (1 - BETAS[0] ** state["step"].item()) / (v.sqrt() + 1e-8)
            rate = group["lr"] / max(1.0, rms[-1] / self.threshold)
            parameter.data = old * (1 - group["lr"] * group["weight_decay"]) - rate * update
        self.largest.append(max(rms))


@every_kernel
@pytest.mark.parametrize("max_norm", [math.inf, 0.3])
def test_fifty_steps_equal_stable_adamw(kernel: dict[str, Any], max_norm: float) -> None:
    poison = {10: 20.0, 25: 8.0, 26: 0.1, 40: 50.0}
    callback = UpdateClip()
    own = [callback] if max_norm == math.inf else [callback, GradClip(max_norm)]
    trainer = quiet_trainer(*own, max_steps=50, log_every_n_steps=0)
    trainer.fit(TinyModule(stable(kernel), poison=poison), TinyData())
    by_hand = ByHand(stable({"foreach": False}), poison=poison, max_norm=max_norm)
    reference = quiet_trainer(max_steps=50)
    reference.fit(by_hand, TinyData(resumes=False))
    torch.testing.assert_close(snapshot(trainer)["weights"], snapshot(reference)["weights"], rtol=2e-5, atol=1e-6)
    state = callback.state_dict()
    assert state["largest"] == pytest.approx(max(by_hand.largest), rel=1e-4)
    assert 0 < state["clipped"] < state["seen"] == 200


@every_kernel
def test_what_is_not_clipped_is_bit_identical_to_a_run_without_the_callback(kernel: dict[str, Any]) -> None:
    ends = []
    for callbacks in ([], [UpdateClip(1e3)], [UpdateClip(0.1, action="log")]):
        trainer = quiet_trainer(*callbacks, max_steps=6)
        trainer.fit(TinyModule(stable(kernel), poison={3: 20.0}), TinyData(resumes=False))
        ends.append(snapshot(trainer))
    assert_same_bits(ends[1], ends[0])
    assert_same_bits(ends[2], ends[0])


@every_kernel
def test_log_counts_what_would_have_been_clipped(kernel: dict[str, Any]) -> None:
    found = []
    for action in ("act", "log"):
        trainer = quiet_trainer(callback := UpdateClip(0.5, action=action), max_steps=1, log_every_n_steps=0)  # type: ignore[arg-type]
        trainer.fit(TinyModule(stable(kernel)), TinyData())
        found.append(callback.state_dict())
    assert found[0] == found[1]
    assert found[0]["clipped"] == 4.0


@every_kernel
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4])
def test_a_skipped_step_changes_nothing_and_is_not_counted_as_clipped(kernel: dict[str, Any], bad: float) -> None:
    after: dict[int, Any] = {}
    callback = UpdateClip(1e-3)
    note = lambda t, *rest: after.update({t.global_step: [snapshot(t), callback.state_dict()["clipped"]]})  # noqa: E731
    own = [GradSpikeSkip(threshold=1e3, z_score=None), GradClip(10.0), callback, Watch("on_train_batch_end", note)]
    trainer = quiet_trainer(*own, max_steps=5, log_every_n_steps=0)
    trainer.fit(TinyModule(stable(kernel), poison={0: bad, 3: bad}), TinyData())
    assert Progress.of(trainer).skipped == 2
    assert_same_bits(after[4], after[3])
    assert [clipped for _, clipped in after.values()] == [0.0, 4.0, 8.0, 8.0, 12.0]


def test_a_gradient_that_is_clipped_is_judged_as_clipped() -> None:
    """Fused: the scale is applied in the kernel, which writes the scaled gradient back."""
    found = []
    for kernel in KERNELS.values():
        trainer = quiet_trainer(callback := UpdateClip(), GradClip(0.05), max_steps=8, log_every_n_steps=0)
        trainer.fit(TinyModule(stable(kernel), poison={5: 100.0}), TinyData())
        found.append(callback.state_dict()["largest"])
    assert found[0] == pytest.approx(found[1], rel=1e-4) == pytest.approx(found[2], rel=1e-4)
    assert found[0] < 2.0  # 4.4 if the gradient of the sixth step were taken as it came


@every_kernel
def test_the_rate_is_the_one_that_the_step_used(kernel: dict[str, Any]) -> None:
    """``EffectiveLR`` puts the scheduler's rate back after the step, by a hook that is there before ours."""
    ends = []
    for callbacks, lr in (([LROverride(start=0, factor=0.25)], 0.08), ([], 0.02)):
        trainer = quiet_trainer(*callbacks, UpdateClip(0.5), max_steps=6)
        trainer.fit(TinyModule(stable(kernel, lr=lr)), TinyData())
        ends.append(snapshot(trainer)["weights"])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


@every_kernel
def test_resumes_bit_for_bit(kernel: dict[str, Any], tmp_path: Path) -> None:
    def fit(*others: Any, resume: Path | None = None) -> Any:
        trainer = quiet_trainer(callback := UpdateClip(0.8), Progress(), *others, max_steps=8, log_every_n_steps=5)
        trainer.fit(TinyModule(stable(kernel), poison={4: 30.0}), TinyData(), ckpt_path=resume)
        return [snapshot(trainer), callback.state_dict()]

    straight = fit(SaveAtSteps(tmp_path))
    assert_same_bits(fit(), straight, "saving changed the run")
    for name in ("start", "micro-2", "micro-6"):
        assert_same_bits(fit(resume=tmp_path / f"{name}.ckpt"), straight, name)


def test_the_fraction_and_the_largest_rms_since_the_last_logging_step_are_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(UpdateClip(1.5), logger=logger, log_every_n_steps=3, max_steps=6, accumulate_grad_batches=2)
    trainer.fit(TinyModule(stable({"fused": True}), poison={4: 1e3}), TinyData())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    columns = {name: [float(row.split(",")[i]) for row in rows] for i, name in enumerate(header.split(","))}
    assert columns["stability/update_clip_frac"] == pytest.approx([0.0, 4 / 12])
    assert (
        columns["stability/update_clip_rms_max"][0]
        < 1.5
        < columns["stability/update_clip_rms_max"][1]
        < 1 / math.sqrt(0.05)
    )


def test_updates_are_clipped_under_manual_optimization_too() -> None:
    class Manual(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(super().training_step(batch, batch_idx))  # type: ignore[arg-type]
            optimizer.step()  # type: ignore[union-attr]

    ends = []
    for make in (TinyModule, Manual):
        trainer = quiet_trainer(UpdateClip(0.5), max_steps=6)
        trainer.fit(make(stable({"fused": True})), TinyData())
        ends.append(snapshot(trainer)["weights"])
    assert_same_bits(ends[1], ends[0])


def test_saving_before_the_first_step_finds_a_state_and_takes_no_step_to_make_one() -> None:
    found: list[int] = []
    watch = Watch("on_train_start", lambda t: found.append(len(t.optimizers[0].state)))
    quiet_trainer(UpdateClip(), watch, max_steps=1).fit(TinyModule(), TinyData())
    assert found == [4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, r"`UpdateClip\(threshold=0.0\)`: must be a finite number > 0"),
        ({"threshold": math.inf}, r"`UpdateClip\(threshold=inf\)`: must be a finite"),
    ],
)
def test_arguments_out_of_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        UpdateClip(**options)


def test_an_optimizer_without_second_moments_is_refused_before_the_first_step() -> None:
    module = TinyModule(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(MisconfigurationException, match=r"`UpdateClip`: SGD is neither torch's Adam nor its AdamW"):
        quiet_trainer(UpdateClip(), max_steps=1).fit(module, TinyData())


def test_flat_parameters_are_refused() -> None:
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    strategy.kwargs = {"use_orig_params": False}  # type: ignore[attr-defined]
    with pytest.raises(MisconfigurationException, match=r"use_orig_params=False.*`UpdateClip` could not tell apart"):
        quiet_trainer(UpdateClip(), strategy=strategy, max_steps=1).fit(TinyModule(), TinyData())


def test_an_update_is_measured_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    measure = AdamUpdate.rms
    monkeypatch.setattr(AdamUpdate, "rms", lambda self: calls.append(1) or measure(self))
    trainer = quiet_trainer(UpdateClip(), max_steps=3, accumulate_grad_batches=2)
    for _ in range(2):  # a second fit registers no second hook
        trainer.fit(TinyModule(), TinyData(resumes=False))
        trainer.fit_loop.epoch_loop.max_steps += 3
    assert len(calls) == 6
