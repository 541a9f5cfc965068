"""Schedules of whole runs without running them: the numbers in the logs of tr8b-104B, and those of a real run here."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from tiny_recipe import command, write_recipe

from lit_stable.callbacks import (
    BatchSizeWarmup,
    GradClip,
    LROverride,
    OptimizerReset,
    Progress,
    ScriptedSkip,
    SequenceLengthWarmup,
)
from lit_stable.callbacks.learning_rate import EffectiveLR
from lit_stable.cli.trace import Row, Trace, trace
from lit_stable.optim.schedule import LRSchedule

PEAK = 6e-5
SCHEDULE = LRSchedule(peak=PEAK, floor=6e-6, warmup=216_320, horizon=126_953_125, unit="samples")
RAMP_OF_104B, RAMP_OF_BLOOM = "16 16 6_000_000", "192 16 9_765_625"


def rows(steps: int, *features: Callback, schedule: LRSchedule = SCHEDULE, **options: Any) -> Trace:
    return trace(schedule, 0.1, 2048, 2048, features, steps, **options)


def ramp(text: str) -> BatchSizeWarmup:
    return BatchSizeWarmup(text, global_batch=2048, micro_batch=1)


# -- golden values ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_104b() -> Trace:
    return rows(17_060, ramp(RAMP_OF_104B))


@pytest.mark.parametrize(
    ("iteration", "samples", "batch"),
    [
        (6502, 216_960, 80),
        (7000, 260_912, 96),
        (8600, 464_560, 160),
        (11_446, 1_255_856, 432),
        (12_000, 1_519_744, 528),
        (14_000, 3_014_320, 1024),
        (16_022, 6_000_864, 2032),
        (16_023, 6_002_912, 2048),
        (17_060, 8_126_688, 2048),
    ],
)
def test_g1_every_log_line_of_the_ramp(of_104b, iteration, samples, batch):
    row = of_104b[iteration - 1]
    assert (row.iteration, row.samples, row.batch, row.tokens) == (iteration, samples, batch, samples * 2048)


def test_g1_the_ramp_of_bloom():
    found = rows(12_695, ramp(RAMP_OF_BLOOM))
    assert (found[12_657].samples, found[12_657].batch, found[12_658].batch) == (9_765_808, 2032, 2048)
    assert found[12_694].samples == 9_841_584


@pytest.mark.parametrize("text", [RAMP_OF_BLOOM, "3 for 10 samples then 2 for 1 samples then 7 for 3 steps then 2048"])
def test_every_batch_is_the_one_that_the_ramp_takes_where_the_run_stands(text):
    warmup = ramp(text)
    found = rows(12_700, warmup)
    before = [0, *found.samples.tolist()]
    assert found.batch.tolist() == [warmup.batch(consumed) for consumed in before[:-1]]
    assert found.batch.tolist() == [after - start for start, after in pairwise(before)]


def test_g2_the_rate_at_the_override_of_bnb_6(of_104b):
    assert f"{of_104b[11_999].lr:.4e}" == "5.9986e-05"
    options = {"horizon": 12_695_312, "floor": 6e-7, "warmup": 216_320, "unit": "samples"}
    # Where a resume at step 12,000 brings the override, and where the recipe says from which sample on.
    for override, resumed_at in ((LROverride(**options), 12_000), (LROverride(start=1_519_744, **options), 0)):
        found = rows(12_001, ramp(RAMP_OF_104B), override, resumed_at=resumed_at)
        assert [f"{row.lr:.4e}" for row in found[11_998:]] == ["5.9986e-05", "5.8415e-05", "5.8414e-05"]


def test_the_clipping_norm_of_b12_at_an_override_leaves_the_features_as_they_are():
    clip, override = GradClip(1.0), LROverride(clip=0.3)
    found = rows(4, clip, override, resumed_at=2)
    assert [row.clip for row in found] == [1.0, 0.3, 0.3, 0.3]  # as the next iteration uses it
    assert clip.overriding is None


def test_g2_the_rate_at_the_rollback_of_en_6():
    found = rows(16_800, ramp(RAMP_OF_104B))
    assert (found[-1].samples, f"{found[-1].lr:.4e}") == (7_594_208, "5.9550e-05")


def test_g3_the_lengths_and_tokens_of_the_curriculum():
    lengths = SequenceLengthWarmup("linear", min_length=64, total_steps=36_000, max_length=2048)
    found = rows(36_000, lengths)
    used = {step: found[step - 1].length for step in (145, 146, 1831, 15_000, 18_000, 36_000)}
    assert used == {145: 64, 146: 72, 1831: 160, 15_000: 888, 18_000: 1056, 36_000: 2048}
    assert [f"{found[step - 1].tokens / 1e9:.1f}" for step in (15_000, 18_000, 36_000)] == ["14.5", "20.5", "77.6"]
    assert found[-1].samples == 36_000 * 2048


def test_the_warm_up_of_bloomberggpt_is_half_done_after_900_iterations():
    schedule = LRSchedule(peak=PEAK, floor=6e-6, warmup=1800, horizon=139_200)
    found = rows(7201, BatchSizeWarmup("1024 for 7200 steps", global_batch=2048, micro_batch=1), schedule=schedule)
    assert (found[899].lr, found[1799].lr) == (3e-5, PEAK)
    assert [(row.samples, row.batch) for row in found[7199:]] == [(7200 * 1024, 1024), (7200 * 1024 + 2048, 2048)]


def test_n14_the_rate_lags_the_samples_where_skipped_steps_hold_it():
    """In tr8b-104B's log the rate reaches its peak at 6503, 0.7k samples late: 44 steps of 16 samples were skipped."""
    skip = ScriptedSkip(["1-44"], schedule_on_skip="hold")
    held, advanced = (rows(6503, ramp(RAMP_OF_104B), *features) for features in ([skip], []))
    assert [row.samples for row in held] == [row.samples for row in advanced]
    assert [row.lr for row in held[:44]] == [0.0] * 44
    assert held[6501].lr < PEAK <= held[6502].lr * (1 + 1e-6)
    first = next(row.iteration for row in advanced if row.lr >= PEAK * (1 - 1e-6))
    assert (first, advanced[6501].samples - 216_256) == (6494, 704)


# -- one column after the other --------------------------------------------------------------------------------------

CONSTANT = LRSchedule(peak=1.0, shape="constant")


def column(name: str, *features: Callback, **options: Any) -> list[Any]:
    return [getattr(row, name) for row in rows(5, *features, schedule=CONSTANT, **options)]


def test_the_clipping_norm_by_its_stages():
    stages = [{"from": 2, "max_norm": 1.5}, {"from": 4, "max_norm": 1.0}]
    assert column("clip", GradClip(2.5, schedule=stages)) == [2.5, 1.5, 1.5, 1.0, 1.0]
    assert column("clip") == [None] * 5
    assert column("clip", GradClip(1.0, action="log")) == [None] * 5


def test_an_override_of_weight_decay_and_rate():
    override = LROverride(start=3, weight_decay=0.01, factor=0.5)
    assert column("weight_decay", override) == [0.1, 0.1, 0.01, 0.01, 0.01]
    assert column("lr", override) == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert column("lr", LROverride(start=3, factor=0.5, action="log")) == [1.0] * 5


def test_what_acts_on_resume_acts_from_the_resume_on():
    assert column("lr", LROverride(factor=0.5), resumed_at=2) == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert column("lr", LROverride(factor=0.5)) == [0.5] * 5
    assert column("lr", OptimizerReset(hold_steps=2), resumed_at=2) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert column("lr", OptimizerReset(hold_steps=2)) == [1.0] * 5


def test_a_reset_holds_the_rate_at_0():
    assert column("lr", OptimizerReset(start=2, hold_steps=2)) == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_the_rate_follows_the_batch_where_it_is_told_to():
    scaled = BatchSizeWarmup("512 for 2 steps", global_batch=2048, micro_batch=1, lr_factor="sqrt")
    assert column("lr", scaled) == [0.5, 1.0, 1.0, 1.0, 1.0]


# -- the command -----------------------------------------------------------------------------------------------------


class Readings(Callback):
    """Keeps what each step of a run used, read back from batch, counters and optimizer."""

    rows: list[dict[str, float]]

    def __init__(self) -> None:
        Readings.rows = []
        self._row: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._row["batch"] = self._row.get("batch", 0) + len(batch["input_ids"])
        self._row["length"] = batch["input_ids"].shape[1]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        progress, effective = Progress.of(trainer), EffectiveLR.of(trainer)
        if progress.steps == len(Readings.rows):  # in mid-window
            return
        self._row.update(samples=progress.samples, tokens=progress.tokens)
        self._row.update({key: effective.used[key][0] for key in ("lr", "weight_decay")})
        Readings.rows.append(self._row)
        self._row = {}


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    assert tuple(lines[0]) == Row._fields
    kinds = (int, int, int, int, int, float, float, float)
    return [Row(*(kind(cell) for kind, cell in zip(kinds, line, strict=True))) for line in lines[1:]]


def test_a_real_run_of_60_steps_uses_and_logs_the_values_of_its_trace(tmp_path):
    features = {
        "batch_size_warmup": {"ramp": "4 2 100", "lr_factor": "sqrt"},
        "sequence_length_warmup": {"min_length": 8, "total_steps": 40, "allow_both": True},
        "lr_override": {"start": 150, "unit": "samples", "factor": 0.5, "weight_decay": 0.01},
        "optimizer_reset": {"start": 30, "hold_steps": 4},
        "scripted_skip": {"steps": ["5-7", 50], "schedule_on_skip": "hold"},
        "grad_clip": {"max_norm": 0.25, "schedule": [{"from": 2000, "max_norm": 0.125}], "unit": "tokens"},
        "extra": {"readings": {"class_path": f"{__name__}.Readings"}},
    }
    recipe = write_recipe(
        tmp_path,
        model__schedule={"peak": 0.01, "unit": "tokens", "warmup": 1500, "horizon": 12_000, "floor": 0.001},
        data__global_batch=8,
        trainer__max_steps=60,
        validate_every=1000,
        stability=features,
    )
    path = tmp_path / "trace.csv"
    done = command("check", "--config", recipe, "--trace", path)
    assert done.code == 0, done.err
    assert done.out.endswith(f"\ntrace: 60 iterations in {path}\n")
    assert not (tmp_path / "runs").exists()
    done = command("fit", "--config", recipe)
    assert done.code == 0, done.err
    expected, found = read(path), Readings.rows
    for name in ("samples", "tokens", "batch", "length"):
        assert [row[name] for row in found] == [getattr(row, name) for row in expected], name
    # What the first 59 rows say of the next iteration; the first one has no row before it.
    for name in ("lr", "weight_decay"):
        assert [row[name] for row in found[1:]] == [getattr(row, name) for row in expected[:-1]], name
    with (tmp_path / "runs" / "tiny" / "0001" / "csv-01" / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [float(row["stability/lr"]) for row in logged[1:]] == pytest.approx(
        [row.lr for row in expected[:-1]], rel=1e-6
    )
    assert [float(row["stability/clip_level"]) for row in logged[1:]] == [row.clip for row in expected[:-1]]
    # All that the recipe asks for has come: no column is the same throughout.
    assert all(len({row[n] for row in expected}) > 1 for n in range(len(Row._fields)))


def test_a_trace_without_an_end_and_one_that_cannot_be_written_are_refused(tmp_path):
    recipe = write_recipe(tmp_path)
    done = command("check", "--config", recipe, "--trace", "t.csv", "--trainer.max_steps", "-1")
    assert (done.code, "trainer.max_steps=-1: a trace needs the end of the run; set it." in done.err) == (2, True)
    done = command("check", "--config", recipe, "--trace", tmp_path / "none" / "t.csv")
    assert (done.code, "t.csv: cannot be written: No such file or directory." in done.err) == (2, True)
