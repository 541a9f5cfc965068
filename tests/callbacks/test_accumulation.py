from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Host, loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import (
    SaveAtSteps,
    TinyData,
    TinyModule,
    Watch,
    adamw,
    assert_same_bits,
    quiet_trainer,
    sample,
    snapshot,
    train_more,
)
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import AccumulationWindows, BatchSizeWarmup, Progress
from lit_stable.callbacks.accumulation import Window


def test_a_window_divides_by_its_size_and_counts_from_its_offset() -> None:
    window = Window(3, offset=5)
    assert 6.0 / window == 2.0
    assert [ready % window for ready in range(5, 12)] == [0, 1, 2, 0, 1, 2, 0]


class Record(AccumulationWindows):
    """Also notes, per optimizer step, how many micro-batches it held and the sum of their weights."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.windows: list[tuple[int, float]] = []
        self._weights: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self._weights.append(1.0 / trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self.windows.append((len(self._weights), sum(self._weights)))
        self._weights = []


def test_a_step_averages_over_the_global_batch() -> None:
    gradients: list[torch.Tensor] = []
    watch = Watch(
        "on_before_optimizer_step", lambda t, o: gradients.append(t.lightning_module.net[0].weight.grad.clone())
    )
    trainer = quiet_trainer(AccumulationWindows(global_batch=6, micro_batch=2), watch, max_steps=1)
    trainer.fit(TinyModule(), TinyData(batch_size=2))

    module = TinyModule()
    batch = torch.stack([sample(i) for i in range(6)])
    (module.net(batch) - batch.roll(1, dims=1)).square().mean().backward()
    torch.testing.assert_close(gradients[0], module.net[0].weight.grad, rtol=1e-6, atol=1e-7)


def test_a_finite_epoch_ends_with_a_short_window_whose_weights_sum_to_one() -> None:
    batches = DataLoader([torch.stack([sample(i)]) for i in range(7)], batch_size=None)  # type: ignore[arg-type]
    windows = Record(3, 1)
    trainer = quiet_trainer(windows, max_steps=-1, max_epochs=2)
    trainer.fit(TinyModule(), train_dataloaders=batches)
    assert windows.windows == [(3, pytest.approx(1)), (3, pytest.approx(1)), (1, 1.0)] * 2
    assert Progress.of(trainer).samples == 14


@pytest.mark.parametrize("fused", [True, False])
def test_a_loader_without_length_that_runs_dry_ends_with_the_mean_over_what_it_held(fused: bool) -> None:
    class Dry(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter([torch.stack([sample(i)]) for i in range(5)])

    gradients: list[torch.Tensor] = []
    watch = Watch(
        "on_before_optimizer_step", lambda t, o: gradients.append(t.lightning_module.net[0].weight.grad.clone())
    )
    trainer = quiet_trainer(AccumulationWindows(3, 1), watch, max_steps=-1, max_epochs=1)
    trainer.fit(TinyModule(adamw(lr=0.0, fused=fused)), train_dataloaders=DataLoader(Dry(), batch_size=None))
    module = TinyModule()
    batch = torch.stack([sample(3), sample(4)])
    (module.net(batch) - batch.roll(1, dims=1)).square().mean().backward()
    torch.testing.assert_close(gradients[1], module.net[0].weight.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("saved_at", [1, 2, 3, 4, 5])
def test_windows_are_whole_after_a_resume_from_any_micro_batch(saved_at: int, tmp_path: Path) -> None:
    quiet_trainer(SaveAtSteps(tmp_path), AccumulationWindows(6, 2), max_steps=2).fit(TinyModule(), TinyData())
    windows = Record(6, 2)
    trainer = quiet_trainer(windows, max_steps=4)
    trainer.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / f"micro-{saved_at}.ckpt")
    assert windows.windows == [(3, pytest.approx(1))] * (4 - saved_at // 3)
    assert Progress.of(trainer).samples == 24


def test_a_resume_with_another_global_batch_opens_a_whole_window_of_the_new_size(tmp_path: Path) -> None:
    quiet_trainer(SaveAtSteps(tmp_path), AccumulationWindows(4, 2), max_steps=3).fit(TinyModule(), TinyData())
    windows = Record(8, 2)
    trainer = quiet_trainer(windows, max_steps=5)
    trainer.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "micro-5.ckpt")  # in the middle of the third window
    assert windows.windows == [(4, 1.0)] * 3
    assert Progress.of(trainer).samples == 2 * 4 + 3 * 8


def test_a_resume_with_another_micro_batch_trains_on_the_same_samples(tmp_path: Path) -> None:
    weights = []
    for micro_batch in (2, 4):
        quiet_trainer(SaveAtSteps(tmp_path), AccumulationWindows(4, 2), max_steps=1).fit(TinyModule(), TinyData())
        trainer = quiet_trainer(AccumulationWindows(4, micro_batch), max_steps=3)
        trainer.fit(TinyModule(adamw(lr=1e-3)), TinyData(micro_batch), ckpt_path=tmp_path / "micro-2.ckpt")
        weights.append(snapshot(trainer)["weights"])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


def test_one_micro_batch_per_step_moves_no_bit() -> None:
    runs = []
    for callbacks in ([], [AccumulationWindows(2, 2)]):
        trainer = quiet_trainer(*callbacks, max_steps=4)
        trainer.fit(TinyModule(), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])


def test_equals_lightnings_own_accumulation_bit_for_bit() -> None:
    runs = []
    for callbacks, own in (([], 3), ([AccumulationWindows(6, 2)], 1)):
        trainer = quiet_trainer(*callbacks, max_steps=4, accumulate_grad_batches=own)
        trainer.fit(TinyModule(), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])


def test_a_second_fit_opens_whole_windows() -> None:
    windows = Record(6, 2)
    trainer = quiet_trainer(windows, max_steps=2)
    module = TinyModule()
    trainer.fit(module, TinyData())
    train_more(trainer, 2)
    trainer.fit(module, TinyData())
    assert windows.windows == [(3, pytest.approx(1))] * 4


def test_a_size_that_changes_in_mid_window_waits_for_the_next_window() -> None:
    class Ramp(Record):
        def window_size(self, trainer: Any) -> int:
            return 2 if len(self.windows) + bool(self._weights) < 2 else 4

    windows = Ramp(4, 2)
    trainer = quiet_trainer(windows, max_steps=4)
    trainer.fit(TinyModule(), TinyData())
    assert windows.windows == [(2, 1.0), (2, 1.0), (4, 1.0), (4, 1.0)]
    assert Progress.of(trainer).samples == 24


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_a_fit_after_one_that_failed_in_mid_window_opens_whole_windows(failing: int) -> None:
    class Fails(TinyModule):
        failed = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            if batch_idx == failing and not self.failed:
                self.failed = True
                raise RuntimeError("the step failed")
            return super().training_step(batch, batch_idx)

    windows = Record(6, 2)
    trainer = quiet_trainer(windows, max_steps=4)
    module = Fails()
    with pytest.raises(RuntimeError, match="the step failed"):
        trainer.fit(module, TinyData())
    windows._weights = []
    trainer.fit(module, TinyData())
    assert windows.windows == [(3, pytest.approx(1))] * 4
    assert Progress.of(trainer).samples == 24


def test_logs_at_multiples_of_the_interval_also_after_a_resume_in_mid_window(tmp_path: Path) -> None:
    def logged(*callbacks: Any, resume: Path | None = None) -> list[tuple[str, str]]:
        logger = CSVLogger(tmp_path, version=f"resumed-{resume is not None}")
        trainer = quiet_trainer(AccumulationWindows(4, 2), *callbacks, logger=logger, log_every_n_steps=2, max_steps=6)
        trainer.fit(TinyModule(), TinyData(), ckpt_path=resume)
        header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
        columns = header.split(",")
        picked = ("step", "progress/micro_batches")
        return [tuple(row.split(",")[columns.index(name)] for name in picked) for row in rows]  # type: ignore[misc]

    # Lightning's x axis counts from 0: the second optimizer step is logged at 1.
    assert logged(SaveAtSteps(tmp_path)) == [("1", "2.0"), ("3", "2.0"), ("5", "2.0")]
    assert logged(resume=tmp_path / "micro-5.ckpt") == [("3", "2.0"), ("5", "2.0")]


@pytest.mark.parametrize(("name", "value"), [("global_batch", 0), ("micro_batch", -3)])
def test_a_size_below_one_is_refused(name: str, value: int) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"`AccumulationWindows\({name}={value}\)`: must be at least 1"
    ):
        AccumulationWindows(**{"global_batch": 4, "micro_batch": 2, name: value})


@pytest.mark.parametrize(("global_batch", "legal"), [(10, "sizes are 8 and 12"), (3, "sizes are 4")])
def test_a_global_batch_that_is_no_multiple_is_refused_with_the_nearest(global_batch: int, legal: str) -> None:
    trainer = quiet_trainer(AccumulationWindows(global_batch, 4))
    with pytest.raises(
        MisconfigurationException, match=rf"global_batch={global_batch}: must be a multiple .*{legal}\."
    ):
        trainer.fit(TinyModule(), TinyData())


def test_the_trainers_own_accumulation_is_refused_also_after_a_validation() -> None:
    trainer = quiet_trainer(AccumulationWindows(4, 2), accumulate_grad_batches=4)
    trainer.validate(TinyModule(), TinyData(validation_batches=1), verbose=False)
    with pytest.raises(MisconfigurationException, match=r"`Trainer\(accumulate_grad_batches=4\)`: .*; delete it"):
        trainer.fit(TinyModule(), TinyData())


class Estimates(Host):
    """Makes its schedule as long as Lightning says that the run is."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("options", [{"max_epochs": 4}, {"max_epochs": 4, "max_steps": 5}, {"max_steps": 7}], ids=str)
def test_lightnings_estimate_of_the_steps_is_the_number_of_windows(options: dict[str, int]) -> None:
    trainer = quiet_trainer(AccumulationWindows(8, 4), **{"max_steps": -1, **options})
    trainer.fit(module := Estimates(), loader())  # epochs of three batches: two windows
    assert module.estimate == trainer.global_step == options.get("max_steps", 8)


def test_where_the_batch_grows_the_estimate_is_refused() -> None:
    trainer = quiet_trainer(ramp := BatchSizeWarmup("4 for 2 steps then 8", 8, 4), max_steps=-1, max_epochs=2)
    with pytest.raises(
        MisconfigurationException, match=r"`trainer\.estimated_stepping_batches`: .* `steps_in\(samples"
    ):
        trainer.fit(Estimates(), loader())
    assert ramp.steps_in(20) == 3
    assert type(trainer.accumulate_grad_batches) is int


def test_a_ramp_that_is_only_logged_leaves_the_estimate() -> None:
    trainer = quiet_trainer(BatchSizeWarmup("4 for 2 steps then 8", 8, 4, action="log"), max_steps=-1, max_epochs=2)
    trainer.fit(module := Estimates(), loader())
    assert module.estimate == trainer.global_step == 4
    assert type(trainer.accumulate_grad_batches) is int  # and no window is left
