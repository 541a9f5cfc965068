"""A run that was begun without us goes on with us: what it consumed is inferred, or asked for, and never 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from tiny_fit import SaveAtSteps, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, sample, snapshot
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lit_stable.callbacks import AccumulationWindows, GradClip, Progress, SequenceLengthWarmup
from lit_stable.callbacks.progress import Mark

ROWS, BATCH, WIDTH = 10, 4, 4  # three batches in an epoch, the last of two samples


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


class Stream(IterableDataset[torch.Tensor]):
    """The same rows without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([sample(index) for index in range(ROWS)])


def loader(dataset: Any = None, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset or Rows(), **{"batch_size": BATCH, **options})


def fit(*callbacks: Any, data: Any = None, module: Any = None, resume: Path | None = None, **options: Any) -> Any:
    trainer = quiet_trainer(*callbacks, **{"max_steps": -1, "max_epochs": 2, **options})
    trainer.fit(module or TinyModule(), train_dataloaders=loader() if data is None else data, ckpt_path=resume)
    return trainer


def begun(folder: Path, name: str, **options: Any) -> Path:
    """A checkpoint of two epochs without a callback of ours."""
    fit(SaveAtSteps(folder), **options)
    return folder / f"{name}.ckpt"


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data", [{}, {"drop_last": True}, {"limit": 2}], ids=str)
def test_what_is_inferred_at_every_save_point_is_what_would_have_been_counted(
    accumulate: int, data: dict[str, Any], tmp_path: Path
) -> None:
    data = dict(data)
    options = {"accumulate_grad_batches": accumulate, "limit_train_batches": data.pop("limit", 1.0)}
    counted: list[Mark] = []
    count = Watch("on_train_batch_end", lambda trainer, *rest: counted.append(Progress.of(trainer).mark))
    fit(Progress(), count, data=loader(**data), **options)
    fit(SaveAtSteps(tmp_path), data=loader(**data), **options)

    inferred: list[Mark | None] = []
    before_first = Watch("on_before_backward", lambda trainer, *rest: inferred.append(Progress.of(trainer).start))
    for number, mark in enumerate(counted, start=1):
        inferred.clear()
        resume = tmp_path / f"micro-{number}.ckpt"
        if number > 1 and mark == counted[number - 2]:  # in mid-window
            with pytest.raises(MisconfigurationException, match="inferred: it was written within an accumulation wind"):
                fit(Progress(), data=loader(**data), resume=resume, **options)
        elif mark.steps:
            fit(Progress(), before_first, data=loader(**data), resume=resume, **{**options, "max_epochs": 3})
            assert inferred[0] == mark, f"after {number} batches"


def test_one_line_says_what_was_inferred_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = begun(tmp_path, "micro-4")
    said: list[str] = []
    monkeypatch.setattr("lit_stable.callbacks.foreign_checkpoint.rank_zero_info", said.append)
    trainer = fit(GradClip(), resume=path)
    assert said == [
        "Progress: the checkpoint of step 4 was written without it; taken as consumed: 14 samples (4 batches of at most"
        " 4 on 1 rank), 56 tokens, 4 each as in the first batch. If that is wrong, give `Progress(samples=...,"
        " tokens=...)`."
    ]
    assert Progress.of(trainer).mark == Mark(6, 14 + 4 + 4, 4 * 22)


def test_counts_that_were_given_are_taken_each_by_itself(tmp_path: Path) -> None:
    path = begun(tmp_path, "micro-3")
    for given, expected in (
        ({"samples": 100, "tokens": 7}, (100, 7)),
        ({"samples": 100}, (100, 400)),
        ({"tokens": 7}, (10, 7)),
    ):
        seen: list[Mark] = []
        note = Watch("on_before_backward", lambda trainer, *rest: seen.append(Progress.of(trainer).start))  # noqa: B023
        fit(Progress(**given), note, resume=path)
        assert seen[0] == Mark(3, *expected)


def test_a_loader_without_length_tells_within_its_first_epoch_alone(tmp_path: Path) -> None:
    fit(SaveAtSteps(tmp_path), data=loader(Stream()))
    trainer = fit(Progress(), data=loader(Stream()), resume=tmp_path / "micro-2.ckpt", max_epochs=1)
    assert Progress.of(trainer).samples >= 8
    for name in ("micro-3", "micro-5"):
        with pytest.raises(MisconfigurationException, match="has no length, so how short the last batch"):
            fit(Progress(), data=loader(Stream()), resume=tmp_path / f"{name}.ckpt")


def test_rounds_of_another_length_are_asked_for(tmp_path: Path) -> None:
    path = begun(tmp_path, "micro-4", limit_train_batches=2)
    with pytest.raises(MisconfigurationException, match=r"epochs had another length than the 3 batches"):
        fit(Progress(), resume=path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: loader([sample(0)[None]] * 9, batch_size=None), "has no fixed batch size"),
        (lambda: [loader(), loader()], "has no fixed batch size"),
        (lambda: loader(batch_size=3), "written with batch_size 4, and the training loader has 3"),
    ],
    ids=["none", "several", "another"],
)
def test_what_cannot_be_inferred_is_asked_for(data: Any, why: str, tmp_path: Path) -> None:
    class Keeps(TinyModule):
        def __init__(self, batch_size: int = BATCH) -> None:
            super().__init__()
            self.save_hyperparameters("batch_size")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch if isinstance(batch, torch.Tensor) else batch[0], batch_idx)

    path = begun(tmp_path, "micro-3", module=Keeps())
    with pytest.raises(
        MisconfigurationException,
        match=rf"checkpoint of step 3: was written without `Progress`.*{why}; give it .*Progress\(samples=",
    ):
        fit(Progress(), data=data(), module=Keeps(), resume=path)


def test_manual_optimization_is_asked_for(tmp_path: Path) -> None:
    class Manual(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    path = begun(tmp_path, "micro-3", module=Manual())
    with pytest.raises(MisconfigurationException, match="under manual optimization Lightning does not save"):
        fit(Progress(), module=Manual(), resume=path)


def test_a_checkpoint_without_lightnings_counters_is_asked_for(tmp_path: Path) -> None:
    path = begun(tmp_path, "micro-3")
    checkpoint = torch.load(path)
    del checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress = Progress()
    trainer = quiet_trainer(progress)
    trainer.state.fn = "fit"
    progress.on_load_checkpoint(trainer, TinyModule(), checkpoint)
    with pytest.raises(
        MisconfigurationException, match=r"does not hold Lightning's counters \('epoch_loop.batch_progr"
    ):
        progress._uncounted.infer_samples(trainer, TinyModule())  # type: ignore[union-attr]


def test_a_batch_of_another_size_than_the_loader_says_is_asked_for(tmp_path: Path) -> None:
    packed = {"collate_fn": lambda rows: torch.cat(rows).view(1, -1)}  # one long row of the samples

    class Packs(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return super().training_step(batch.view(-1, WIDTH), batch_idx)

    path = begun(tmp_path, "micro-3", module=Packs(), data=loader(**packed))
    with pytest.raises(MisconfigurationException, match="loader has batch_size 4, and a batch holds 1 samples"):
        fit(Progress(), module=Packs(), data=loader(**packed), resume=path)


def test_tokens_that_the_module_counts_itself_are_asked_for(tmp_path: Path) -> None:
    class Counts(TinyModule):
        def count_batch(self, batch: torch.Tensor) -> tuple[int, int]:
            return len(batch), 5

    path = begun(tmp_path, "micro-3")
    with pytest.raises(MisconfigurationException, match="count_batch may find other tokens in every sample"):
        fit(Progress(), module=Counts(), resume=path)
    trainer = fit(Progress(tokens=15), module=Counts(), resume=path)
    assert Progress.of(trainer).mark == Mark(6, 20, 30)


def test_a_loader_that_asks_for_the_position_is_told_to_give_it(tmp_path: Path) -> None:
    class Positioned(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(torch.utils.data.Subset(Rows(), range(Progress.of(self.trainer).position % ROWS, ROWS)))

    path = begun(tmp_path, "micro-3")
    with pytest.raises(MisconfigurationException, match=r"the training loader is made from it; give it"):
        quiet_trainer(Progress(), max_steps=4).fit(TinyModule(), datamodule=Positioned(), ckpt_path=path)
    trainer = quiet_trainer(Progress(samples=10, tokens=40), max_steps=4)
    trainer.fit(TinyModule(), datamodule=Positioned(), ckpt_path=path)
    assert Progress.of(trainer).mark == Mark(4, 14, 56)


def test_tokens_of_samples_that_are_shortened_now_were_whole(tmp_path: Path) -> None:
    path = begun(tmp_path, "micro-3")

    class Any_(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return super().training_step(torch.nn.functional.pad(batch, (0, WIDTH - batch.shape[1])), batch_idx)

    for mode, tokens in (("truncate", 10 * 4 + 10 * 2), ("melt", 10 * 4 + 10 * 4)):
        warmup = SequenceLengthWarmup("2 for 99 steps", max_length=4, mode=mode)  # type: ignore[arg-type]
        trainer = fit(Progress(), warmup, module=Any_(), resume=path)
        assert Progress.of(trainer).mark == Mark(6, 20, tokens), mode


def test_a_save_before_the_first_batch_keeps_what_is_not_known_yet(tmp_path: Path) -> None:
    path = begun(tmp_path, "micro-3")
    fit(Progress(), SaveAtSteps(tmp_path), resume=path)
    assert torch.load(tmp_path / "start.ckpt")["callbacks"]["Progress"]["tokens"] is None
    trainer = fit(Progress(), resume=tmp_path / "start.ckpt")
    assert Progress.of(trainer).mark == Mark(6, 20, 80)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[3])


class Scheduled(TinyModule):
    def __init__(self) -> None:
        super().__init__(adamw(fused=False, foreach=True))
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": sequential(optimizer), "interval": "step"}}


def test_its_schedule_and_weights_go_on_as_if_nothing_had_been_added(tmp_path: Path) -> None:
    straight = fit(SaveAtSteps(tmp_path), module=(whole := Scheduled()), max_epochs=3)
    ours = [Progress(), GradClip(1e9), AccumulationWindows(BATCH, BATCH)]
    resumed = fit(*ours, module=(rest := Scheduled()), resume=tmp_path / "micro-3.ckpt", max_epochs=3)
    assert rest.rates == whole.rates[3:]
    assert_same_bits(snapshot(resumed), snapshot(straight))
    assert Progress.of(resumed).mark == Mark(9, 30, 120)


def test_evaluating_a_foreign_checkpoint_needs_no_counters(tmp_path: Path) -> None:
    path = begun(tmp_path, "micro-3")
    trainer = quiet_trainer(Progress())
    trainer.validate(TinyModule(), dataloaders=loader(), ckpt_path=path, verbose=False)
    assert Progress.of(trainer).mark == Mark(0, 0, 0)


class Stateful(DataLoader[torch.Tensor]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda: loader(Stream()), ["Progress: 8 samples were consumed before this resume"]),
        (lambda: Stateful(Stream(), batch_size=BATCH), []),
        (loader, []),  # of those with a length Lightning itself speaks
    ],
    ids=["stream", "stateful", "finite"],
)
def test_a_resumed_stream_that_does_not_ask_for_its_place_is_told(
    data: Any, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lit_stable.callbacks.begun_fit.rank_zero_warn", said.append)
    fit(Progress(), SaveAtSteps(tmp_path), data=data(), max_steps=2)
    assert said == []
    fit(Progress(), data=data(), resume=tmp_path / "micro-2.ckpt", max_steps=3)
    assert [line.split(",")[0] for line in said] == told
