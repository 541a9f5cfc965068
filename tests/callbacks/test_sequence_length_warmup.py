from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import SaveAtSteps, Stream, Watch, assert_same_bits, quiet_trainer, snapshot, train_more
from torch.utils.data import DataLoader

from lit_stable.callbacks import AccumulationWindows, BatchSizeWarmup, Progress, SequenceLengthWarmup, StepSeed
from lit_stable.callbacks.private_names import compiled_graphs

B, T = 2, 12
LENGTHS = [2, 4, 6, 8, 10, 12, 12]  # of steps 1, 2, ... under `warmup()`


class LongStream(Stream):
    """Batches (B, T): the numbers of the sample at its T positions."""

    def __iter__(self) -> Any:
        first = self.start
        while True:
            rows = torch.arange(first, first + self.batch_size, dtype=torch.float32)[:, None]
            yield torch.sin(rows * 7 + torch.arange(T))
            first += self.batch_size


class Data(LightningDataModule):
    """The stream as tensors, or as whatever ``wrap`` makes of one."""

    def __init__(self, wrap: Any = lambda tensor: tensor) -> None:
        super().__init__()
        self.wrap = wrap

    def train_dataloader(self) -> DataLoader[Any]:
        stream = LongStream(Progress.of(self.trainer).position, B)
        return DataLoader(stream, batch_size=None, collate_fn=self.wrap)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader([self.wrap(torch.ones(B, T))], batch_size=None)  # type: ignore[arg-type]


class AnyLength(LightningModule):
    """One weight per position, dropout, and a note of every shape that it is given."""

    def __init__(self, unwrap: Any = lambda batch: batch, compile: Any = lambda function: function) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, T))
        self.unwrap = unwrap
        self.loss = compile(lambda tokens, weight: (tokens * weight[: tokens.shape[1]]).square().mean())
        self.trained: list[tuple[int, ...]] = []
        self.validated: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = self.unwrap(batch)
        self.trained.append(tuple(tokens.shape))
        return self.loss(torch.nn.functional.dropout(tokens, 0.3), self.weight)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(tuple(self.unwrap(batch).shape))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def warmup(**options: Any) -> SequenceLengthWarmup:
    linear = {"min_length": 2, "total_steps": 6, "max_length": T, "multiple_of": 2}
    return SequenceLengthWarmup(**{**linear, **options})


def lengths_of(trained: list[tuple[int, ...]]) -> list[int]:
    return [shape[1] for shape in trained]


def test_each_step_trains_on_its_length_and_validation_on_the_full_one() -> None:
    trainer = quiet_trainer(warmup(), max_steps=7, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(module := AnyLength(), Data())
    assert lengths_of(module.trained) == [2, 4, 6, 8, 10, 12, 12]
    assert set(module.validated) == {(B, T)}


def test_tokens_are_counted_after_the_cut_and_samples_stay() -> None:
    trainer = quiet_trainer(warmup(), max_steps=7)
    trainer.fit(AnyLength(), Data())
    progress = Progress.of(trainer)
    assert (progress.samples, progress.tokens) == (7 * B, B * sum(LENGTHS))
    assert sum(warmup().tokens_in(B, step) for step in range(1, 8)) == progress.tokens


def test_all_micro_batches_of_a_window_have_one_length() -> None:
    trainer = quiet_trainer(warmup(), AccumulationWindows(3 * B, B), max_steps=3)
    trainer.fit(module := AnyLength(), Data())
    assert lengths_of(module.trained) == [2] * 3 + [4] * 3 + [6] * 3
    assert Progress.of(trainer).tokens == 3 * B * (2 + 4 + 6)


def test_melting_trains_on_all_of_a_sample_and_counts_it_once() -> None:
    seen: list[Any] = []
    watch = Watch("on_train_batch_start", lambda t, batch, i: seen.append(batch["x"].clone()))
    data = Data(lambda tensor: {"x": tensor, "row": torch.arange(B)})
    trainer = quiet_trainer(warmup(mode="melt"), watch, max_steps=7)
    trainer.fit(module := AnyLength(lambda batch: batch["x"]), data)
    rows = [T // length * B for length in LENGTHS]
    assert module.trained == list(zip(rows, LENGTHS, strict=True))
    first = next(iter(LongStream(0, B)))
    assert torch.equal(seen[0], first.reshape(B * 6, 2))
    assert torch.equal(seen[3], next(iter(LongStream(3 * B, B)))[:, :8])
    progress = Progress.of(trainer)
    # At length 8 and 10 a row holds one piece and loses the rest.
    assert (progress.samples, progress.tokens) == (7 * B, B * (12 + 12 + 12 + 8 + 10 + 12 + 12))
    assert [warmup(mode="melt").tokens_in(B, step) for step in (1, 4)] == [B * 12, B * 8]


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: {"ids": x, "source": torch.zeros(B)}, lambda batch: batch["ids"]),
        (lambda x: (x, x.clone()), lambda batch: batch[1]),
        (lambda x: [torch.zeros(B), {"deep": x[..., None]}], lambda batch: batch[1]["deep"].squeeze(-1)),
    ],
)
def test_any_structure_of_batch_and_positions(wrap: Any, unwrap: Any) -> None:
    trainer = quiet_trainer(warmup(), max_steps=3)
    trainer.fit(module := AnyLength(unwrap), Data(wrap))
    assert lengths_of(module.trained) == [2, 4, 6]


def test_batches_that_are_shorter_stay_as_they_are() -> None:
    trainer = quiet_trainer(warmup(shape="6 for 2 steps", min_length=None, total_steps=None), max_steps=3)
    trainer.fit(module := AnyLength(), Data(lambda x: x[:, :4]))
    assert lengths_of(module.trained) == [4, 4, 4]


@pytest.mark.parametrize("mode", ["truncate", "melt"])
@pytest.mark.parametrize("saved_at", ["start", "micro-3", "micro-4"])
def test_resumes_bit_for_bit_from_any_save_point(mode: Any, saved_at: str, tmp_path: Path) -> None:
    def fit(*others: Any, resume: Path | None = None) -> Any:
        trainer = quiet_trainer(warmup(mode=mode), AccumulationWindows(2 * B, B), StepSeed(1), *others, max_steps=5)
        trainer.fit(AnyLength(), Data(), ckpt_path=resume)
        return trainer

    straight = fit(SaveAtSteps(tmp_path))
    resumed = fit(resume=tmp_path / f"{saved_at}.ckpt")
    assert_same_bits(snapshot(resumed), snapshot(straight))
    assert Progress.of(resumed).mark == Progress.of(straight).mark


def test_log_only_moves_no_bit_and_logs_what_the_length_would_be(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [warmup(action="log")]):
        torch.manual_seed(0)
        trainer = quiet_trainer(Progress(), *callbacks, max_steps=3, logger=CSVLogger(tmp_path), log_every_n_steps=1)
        trainer.fit(AnyLength(), Data())
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])
    assert trainer.logged_metrics["stability/sequence_length"] == 6.0
    assert warmup(action="log").length(1) == T


def test_logs_the_length_of_the_step_in_the_row_of_its_loss(tmp_path: Path) -> None:
    class Logs(AnyLength):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    logger = CSVLogger(tmp_path)
    quiet_trainer(warmup(), max_steps=4, logger=logger, log_every_n_steps=2).fit(Logs(), Data())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    columns = header.split(",")
    found = [
        (row.split(",")[columns.index("stability/sequence_length")], row.split(",")[columns.index("loss")])
        for row in rows
    ]
    assert [(length, loss != "") for length, loss in found if length] == [("4.0", True), ("8.0", True)]


def test_the_strategy_is_as_found_after_a_fit_and_after_one_that_failed() -> None:
    class Fails(AnyLength):
        failed = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(self.trained) == 2 and not self.failed:
                self.failed = True
                raise RuntimeError("the step failed")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(warmup(mode="melt"), max_steps=4)
    before = set(vars(trainer.strategy))
    with pytest.raises(RuntimeError, match="the step failed"):
        trainer.fit(module := Fails(), Data())
    assert "batch_to_device" not in vars(trainer.strategy)
    trainer.fit(module, Data())
    assert lengths_of(module.trained) == [2, 4, 6, 8]
    assert set(vars(trainer.strategy)) == before
    assert Progress.of(trainer).rows_per_sample == 1
    train_more(trainer, 1)
    trainer.fit(module, Data())
    assert lengths_of(module.trained)[-1] == 10


def test_the_full_length_comes_from_the_data_module() -> None:
    data = Data()
    data.sequence_length = T  # type: ignore[attr-defined]
    trainer = quiet_trainer(SequenceLengthWarmup("2 for 1 steps"), max_steps=2)
    trainer.fit(module := AnyLength(), data)
    assert lengths_of(module.trained) == [2, T]
    with pytest.raises(
        MisconfigurationException, match=r"max_length=24\)`: the data module has sequence_length=12; leave"
    ):
        quiet_trainer(warmup(max_length=24)).fit(AnyLength(), data)


def test_without_a_full_length_it_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"`SequenceLengthWarmup\(max_length=None\)`: the data module has no"
    ):
        quiet_trainer(SequenceLengthWarmup("2 for 1 steps")).fit(AnyLength(), Data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": None}, r"shape linear needs min_length and total_steps"),
        ({"shape": "2 for 3 steps"}, r"leave min_length and total_steps out"),
        ({"shape": "cubic", "min_length": None, "total_steps": None}, r"shape='cubic'\)`: 'cubic': must be a whole"),
        ({"min_length": 3}, r"min_length=3: .* nearest legal values are 2 and 4"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        warmup(**options)


def test_longer_batches_than_the_full_length_are_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"batch of length 12: .*max_length=8\)` .*; set max_length to 12"
    ):
        quiet_trainer(warmup(max_length=8)).fit(AnyLength(), Data())


def test_a_batch_without_positions_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"batch of type dict: holds no tensor of shape \(B, T, \.\.\.\)"
    ):
        quiet_trainer(warmup()).fit(AnyLength(), Data(lambda x: {"source": x[:, 0]}))


def test_beside_a_batch_size_warmup_it_is_refused_unless_allowed() -> None:
    def ramp() -> BatchSizeWarmup:
        return BatchSizeWarmup("2 for 1 steps", global_batch=4, micro_batch=B)

    with pytest.raises(
        MisconfigurationException, match=r"`SequenceLengthWarmup` and `BatchSizeWarmup`: .* set allow_both"
    ):
        quiet_trainer(ramp(), warmup()).fit(AnyLength(), Data())
    for mode in ("truncate", "melt"):
        trainer = quiet_trainer(ramp(), warmup(allow_both=True, mode=mode), max_steps=2)
        trainer.fit(module := AnyLength(), Data())
        assert lengths_of(module.trained) == [2, 4, 4]
        assert Progress.of(trainer).samples == 2 + 4


@pytest.mark.parametrize(("dynamic", "warned"), [(False, True), (None, False)])
def test_a_compilation_per_length_is_warned_about_and_dynamic_shapes_need_none(
    dynamic: bool | None, warned: bool
) -> None:
    torch._dynamo.reset()
    compile = functools.partial(torch.compile, backend="eager", dynamic=dynamic)
    before = compiled_graphs()
    trainer = quiet_trainer(warmup(), max_steps=6, limit_val_batches=0)
    module = AnyLength(compile=compile)  # before warnings are recorded: quiet_trainer filters them
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, Data())
    said = [str(w.message) for w in caught if "cost a compilation" in str(w.message)]
    assert bool(said) == warned
    if warned:
        assert "each of the last 3 lengths cost a compilation, 3 are to come" in said[0]
    else:
        assert compiled_graphs() - before <= 3
