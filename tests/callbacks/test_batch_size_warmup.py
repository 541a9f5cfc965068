from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import (
    WIDTH,
    SaveAtSteps,
    TinyData,
    TinyModule,
    assert_same_bits,
    quiet_trainer,
    sample,
    snapshot,
    train_more,
)
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import AccumulationWindows, BatchSizeWarmup, Progress, StepSeed
from lit_stable.callbacks.learning_rate import EffectiveLR

RAMP = "4 for 2 steps then 8 for 1 steps then 12"


class Steps(Callback):
    """Per optimizer step: samples, micro-batches, and the sum of the micro-batches' weights in the gradient."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, float]] = []
        self._weights: list[float] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        self._weights.append(1.0 / trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        progress = Progress.of(trainer)
        self.rows.append((progress.samples - progress.start.samples, len(self._weights), sum(self._weights)))
        self._weights = []


def ramped(ramp: Any = RAMP, full: int = 12, micro_batch: int = 2, **options: Any) -> BatchSizeWarmup:
    return BatchSizeWarmup(ramp, global_batch=full, micro_batch=micro_batch, **options)


def test_every_window_is_whole_and_its_weights_sum_to_one() -> None:
    steps = Steps()
    trainer = quiet_trainer(ramped(), steps, max_steps=5)
    trainer.fit(TinyModule(), TinyData())
    assert [row[:2] for row in steps.rows] == [(4, 2), (4, 2), (8, 4), (12, 6), (12, 6)]
    assert [row[2] for row in steps.rows] == [pytest.approx(1)] * 5
    assert Progress.of(trainer).samples == ramped().samples_before(6) == 40


@pytest.mark.parametrize("saved_at", [0, 1, 3, 4, 6, 8, 13])
def test_resumes_bit_for_bit_in_the_right_stage_from_any_micro_batch(saved_at: int, tmp_path: Path) -> None:
    straight = quiet_trainer(ramped(), StepSeed(1), SaveAtSteps(tmp_path), max_steps=5)
    straight.fit(TinyModule(dropout=0.3), TinyData())
    steps = Steps()
    resumed = quiet_trainer(ramped(), StepSeed(1), steps, max_steps=5)
    path = tmp_path / (f"micro-{saved_at}.ckpt" if saved_at else "start.ckpt")
    resumed.fit(TinyModule(dropout=0.3), TinyData(), ckpt_path=path)
    left = sum(end > saved_at for end in (2, 4, 8, 14, 20))
    assert [row[0] for row in steps.rows] == [4, 4, 8, 12, 12][5 - left :]
    assert_same_bits(snapshot(resumed), snapshot(straight))


def test_a_resume_with_another_micro_batch_keeps_the_ramp(tmp_path: Path) -> None:
    quiet_trainer(ramped(), SaveAtSteps(tmp_path), max_steps=3).fit(TinyModule(), TinyData())
    steps = Steps()
    trainer = quiet_trainer(ramped(micro_batch=4), steps, max_steps=5)
    trainer.fit(TinyModule(), TinyData(batch_size=4), ckpt_path=tmp_path / "micro-5.ckpt")  # in the third window
    assert [row[:2] for row in steps.rows] == [(8, 2), (12, 3), (12, 3)]
    assert Progress.of(trainer).samples == 40


class Batches(IterableDataset[torch.Tensor]):
    """So many batches of two samples, with no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.stack([sample(2 * i), sample(2 * i + 1)]) for i in range(self.count)])


@pytest.mark.parametrize("kind", ["sized", "unsized", "limited"])
def test_the_last_window_of_a_finite_epoch_averages_over_what_it_holds(kind: str) -> None:
    batches = DataLoader(Batches(7) if kind != "sized" else list(Batches(7)), batch_size=None)  # type: ignore[arg-type]
    limit = {"limit_train_batches": 7} if kind == "limited" else {}
    loader = DataLoader(Batches(20), batch_size=None) if kind == "limited" else batches
    steps = Steps()
    gradients: list[torch.Tensor] = []

    class Keep(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients.append(pl_module.net[0].weight.grad.clone())

    trainer = quiet_trainer(ramped(), steps, Keep(), max_steps=-1, max_epochs=2, **limit)
    trainer.fit(module := TinyModule(lambda p: torch.optim.SGD(p, lr=0.0)), train_dataloaders=loader)
    # Epoch 1: 4, 4, then 6 of 8 are left. Epoch 2 begins at 14 samples, still below the mark of 16; the mark stays.
    assert [row[0] for row in steps.rows] == [4, 4, 6, 8, 6]
    assert Progress.of(trainer).samples == 28
    batch = torch.stack([sample(i) for i in range(8, 14)])
    module.zero_grad()
    (module.net(batch) - batch.roll(1, dims=1)).square().mean().backward()
    for last in (gradients[2], gradients[4]):
        torch.testing.assert_close(last, module.net[0].weight.grad, rtol=1e-5, atol=1e-7)


class Loader(IterableDataset[torch.Tensor]):
    """Micro-batches as the ramp wants them, of zeros."""

    def __init__(self, ramp: BatchSizeWarmup, start: int) -> None:
        self.ramp, self.start = ramp, start

    def __iter__(self) -> Iterator[torch.Tensor]:
        consumed = self.start
        while True:
            batch, micro_batch = self.ramp.window_at(consumed, ranks=1)
            yield from [torch.zeros(micro_batch, WIDTH)] * (batch // micro_batch)
            consumed += batch


@pytest.mark.parametrize("stage", [1, 127])
def test_the_trainer_follows_megatrons_ramp_for_100_steps_around_a_switch(stage: int, tmp_path: Path) -> None:
    ramp = BatchSizeWarmup("16 16 6_000_000", global_batch=2048, micro_batch=512, fit_micro_batch=True)
    first = ramp.schedule.stages[stage].step + 1 - 50
    assert len({ramp.batch(ramp.samples_before(step)) for step in range(first, first + 100)}) > 1
    foreign = quiet_trainer(max_steps=1)
    foreign.fit(TinyModule(), TinyData(resumes=False))
    foreign.save_checkpoint(tmp_path / "a.ckpt")
    steps = Steps()
    start = ramp.samples_before(first)
    trainer = quiet_trainer(Progress(samples=start, tokens=0), ramp, steps, max_steps=101)
    loader = DataLoader(Loader(ramp, start), batch_size=None)
    trainer.fit(TinyModule(), train_dataloaders=loader, ckpt_path=tmp_path / "a.ckpt")
    expected = [ramp.samples_before(n + 1) - ramp.samples_before(n) for n in range(first, first + 100)]
    assert [row[0] for row in steps.rows] == expected
    assert all(row[2] == pytest.approx(1) for row in steps.rows)


class Planned(Loader):
    """The micro-batches of the steps of a plan."""

    def __init__(self, ramp: BatchSizeWarmup, plan: list[int]) -> None:
        super().__init__(ramp, 0)
        self.plan = plan

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in self.plan:
            batch, micro_batch = self.ramp.window_at(self.ramp.samples_before(step), ranks=1)
            yield from [torch.zeros(micro_batch, WIDTH)] * (batch // micro_batch)


class Jump(Callback):
    """Moves the counters from step to step of a plan, as if all between had been trained."""

    def __init__(self, ramp: BatchSizeWarmup, plan: list[int]) -> None:
        self.ramp, self.plan, self.done = ramp, plan, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._go(Progress.of(trainer))

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if not Progress.of(trainer).pending_samples and self.done + 1 < len(self.plan):
            self.done += 1
            self._go(Progress.of(trainer))

    def _go(self, progress: Progress) -> None:
        step = self.plan[self.done]
        progress.steps, progress.samples = step - 1, self.ramp.samples_before(step)


class OneWeight(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(WIDTH, 1, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).mean()  # type: ignore[no-any-return]


def test_the_trainer_follows_megatrons_ramp_around_every_switch() -> None:
    ramp = BatchSizeWarmup("16 16 6_000_000", global_batch=2048, micro_batch=512, fit_micro_batch=True)
    switches = ramp.schedule.stages[1:]
    assert len(switches) == 127
    plan = [step for stage in switches for step in range(stage.step - 1, stage.step + 3)]  # two before, two behind
    loader = DataLoader(Planned(ramp, plan), batch_size=None)
    trainer = quiet_trainer(ramp, Jump(ramp, plan), steps := Steps(), max_steps=len(plan))
    trainer.fit(OneWeight(), train_dataloaders=loader)
    sizes = [16 * n for n in range(1, 129)]
    assert [row[0] for row in steps.rows] == [n for pair in pairwise(sizes) for n in (pair[0],) * 2 + (pair[1],) * 2]
    assert [row[2] for row in steps.rows] == [pytest.approx(1)] * len(plan)


def test_a_fitted_micro_batch_is_the_largest_that_divides_a_ranks_share() -> None:
    ramp = BatchSizeWarmup("16 16 6_000_000", global_batch=2048, micro_batch=8, fit_micro_batch=True)
    assert [ramp.window_at(n, ranks=8) for n in (0, 47_245, 94_489, 6_000_000)] == [
        (16, 2),
        (32, 4),
        (48, 6),
        (2048, 8),
    ]
    assert ramp.window_at(4 * 47_245, ranks=16) == (80, 5)
    assert ramp.stage_problems(ranks=16) == []
    assert "its batch 16 (and 63 more) must be a multiple of 32 data-parallel ranks" in ramp.stage_problems(32)[0]


@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 8), (6, 2), (8, 16), (512, 1), (4096, 4)])
def test_of_every_stage_the_fitted_micro_batch_is_legal_and_no_larger_one_is(micro_batch: int, ranks: int) -> None:
    ramp = ramped("16 16 6_000_000", 2048, micro_batch, fit_micro_batch=True)
    assert ramp.stage_problems(ranks) == []
    for stage in ramp.schedule.stages:
        batch, fitted = ramp.window_at(stage.mark, ranks)
        share = batch // ranks  # of each rank
        assert fitted == max(n for n in range(1, min(micro_batch, share) + 1) if share % n == 0)


def test_a_loader_that_hands_out_other_micro_batches_is_refused() -> None:
    trainer = quiet_trainer(ramped("2 for 1 steps", full=8, micro_batch=4, fit_micro_batch=True))
    with pytest.raises(
        MisconfigurationException, match=r"batch of 4 samples: `BatchSizeWarmup` expects 2 per rank here"
    ):
        trainer.fit(TinyModule(), TinyData(batch_size=4))


def test_only_stages_to_come_must_be_legal(tmp_path: Path) -> None:
    quiet_trainer(ramped(), SaveAtSteps(tmp_path), max_steps=4).fit(TinyModule(), TinyData())
    larger = quiet_trainer(ramped(micro_batch=12), max_steps=5)
    message = (
        r"its batch 4 \(and 1 more\) must be a multiple of micro_batch x .* = 12 x 1 = 12; the nearest .* are 12, or"
    )
    with pytest.raises(MisconfigurationException, match=message):
        larger.fit(TinyModule(), TinyData(batch_size=12))
    later = quiet_trainer(ramped(micro_batch=12), max_steps=5)
    later.fit(TinyModule(), TinyData(batch_size=12), ckpt_path=tmp_path / "micro-14.ckpt")
    assert Progress.of(later).samples == 40


@pytest.mark.parametrize(("kind", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_rate_of_a_step_is_that_of_its_batch(kind: Any, power: float) -> None:
    used: list[float] = []

    class Read(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            rates = EffectiveLR.of(trainer).used.get("lr")
            used.extend(rates or [])

    trainer = quiet_trainer(ramped(lr_factor=kind), EffectiveLR(), Read(), max_steps=4)
    trainer.fit(TinyModule(lambda p: torch.optim.SGD(p, lr=0.5)), TinyData())
    assert used == [pytest.approx(0.5 * (batch / 12) ** power) for batch in (4, 4, 8, 12)]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_log_only_trains_on_the_full_batch_bit_for_bit_and_logs_the_ramp(tmp_path: Path) -> None:
    runs = []
    for windows in (AccumulationWindows(12, 2), ramped(action="log", lr_factor="linear")):
        logger = CSVLogger(tmp_path, name=type(windows).__name__)
        trainer = quiet_trainer(windows, max_steps=3, logger=logger, log_every_n_steps=1)
        trainer.fit(TinyModule(), TinyData())
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])
    assert trainer.logged_metrics["progress/micro_batches"] == 6.0
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    # By consumed samples: after two full batches the ramp would be at its end.
    sizes = [row.split(",")[header.split(",").index("stability/batch_size")] for row in rows]
    assert [size for size in sizes if size] == ["4.0", "8.0", "12.0"]
    assert ramped(action="log").samples_before(3) == 24


def test_sizes_come_from_the_data_module() -> None:
    data = TinyData()
    data.global_batch, data.micro_batch, data.sequence_length = 12, 2, WIDTH  # type: ignore[attr-defined]
    steps = Steps()
    warmup = BatchSizeWarmup("4 for 32 tokens")  # 8 samples of 4 tokens
    quiet_trainer(warmup, steps, max_steps=3).fit(TinyModule(), data)
    assert [row[0] for row in steps.rows] == [4, 4, 12]
    with pytest.raises(
        MisconfigurationException, match=r"`BatchSizeWarmup\(global_batch=8\)`: the data module has global_batch=12"
    ):
        quiet_trainer(BatchSizeWarmup("4 for 2 steps", global_batch=8)).fit(TinyModule(), data)


@pytest.mark.parametrize(("options", "lacking"), [({}, "global_batch"), ({"global_batch": 4}, "micro_batch")])
def test_a_size_that_is_given_nowhere_is_refused(options: dict[str, int], lacking: str) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"`BatchSizeWarmup\({lacking}=None\)`: the data module has no"
    ):
        quiet_trainer(BatchSizeWarmup("2 for 1 steps", **options)).fit(TinyModule(), TinyData())


def test_a_ramp_that_cannot_be_read_is_refused_with_its_text() -> None:
    with pytest.raises(MisconfigurationException, match=r"`BatchSizeWarmup\(ramp='4 for 2 steps then 8'\)`: ends at 8"):
        ramped("4 for 2 steps then 8", full=16)


def test_plain_windows_beside_it_are_refused_in_either_order() -> None:
    for callbacks in ([ramped(), AccumulationWindows(12, 2)], [AccumulationWindows(12, 2), ramped()]):
        with pytest.raises(MisconfigurationException, match=r"`AccumulationWindows\(global_batch=12\)`: .*; delete it"):
            quiet_trainer(*callbacks).fit(TinyModule(), TinyData())


def test_a_second_fit_goes_on_in_the_ramp_also_after_one_that_failed() -> None:
    class Fails(TinyModule):
        failed = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            if self.trainer.global_step == 2 and not self.failed:
                self.failed = True
                raise RuntimeError("the step failed")
            return super().training_step(batch, batch_idx)

    steps, module = Steps(), Fails()
    trainer = quiet_trainer(ramped(lr_factor="sqrt"), steps, max_steps=4)
    with pytest.raises(RuntimeError, match="the step failed"):
        trainer.fit(module, TinyData())
    trainer.fit(module, TinyData())
    train_more(trainer, 1)
    trainer.fit(module, TinyData())
    assert [row[:2] for row in steps.rows] == [(4, 2), (4, 2), (8, 4), (12, 6), (12, 6)]
