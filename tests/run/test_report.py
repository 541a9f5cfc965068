"""What a person sees of a run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from signal import SIGTERM
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from tiny_fit import Watch, quiet_trainer
from tiny_gpt_run import GLOBAL_BATCH, LENGTH, MICRO_BATCH, NumberedData, tiny_module

from lit_stable.callbacks import (
    AccumulationWindows,
    GracefulStop,
    GradClip,
    LROverride,
    Progress,
    Recovery,
    ValidateEverySteps,
)
from lit_stable.callbacks.progress import Mark
from lit_stable.run.report import Report
from lit_stable.run.start import describe


class Data(NumberedData):
    """Numbered samples with what a report asks of the application's data."""

    validation_names = ("0",)

    def unigram_entropy(self, name: str) -> float:
        return 3.5


def fit(report: Report, steps: int = 5, more: Sequence[Callback] = (), every: int = 100, logged: int = 2) -> None:
    """Train the tiny GPT, validating ``every`` so many steps and at the end."""
    own = [Progress(), AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH), ValidateEverySteps(every), *more]
    options = {"log_every_n_steps": logged, "check_val_every_n_epoch": None}
    quiet_trainer(*own, report, max_steps=steps, **options).fit(tiny_module(), datamodule=Data())


@pytest.fixture(scope="module")
def said() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("lit_stable.run.report.say", lambda text: lines.extend(text.splitlines()))
        fit(Report("lit-stable fit --resume auto"), more=[GradClip(0.5), LROverride(start=3, factor=0.1)])
    return lines


def line(said: list[str], beginning: str) -> str:
    return next(line for line in said if line.startswith(beginning))


def test_the_first_lines_answer_what_one_asks_first(said):
    assert re.match(r"lit-stable \S+, torch ", said[0])
    assert re.search(
        r"1 x CPU, \d+ cores; started by this command; strategy SingleDeviceStrategy; precision 32-true", said[1]
    )
    parameters = sum(p.numel() for p in built().parameters())
    assert line(said, "model: ").startswith(f"model: {parameters:,} parameters; GPTConfig(vocab_size=64, n_layer=2")
    tensors = len(list(built().parameters()))
    assert line(said, "dtypes: ") == (
        f"dtypes: parameters {{'float32': {tensors}}}, moments {{'float32': {2 * tensors}}}, buffers none"
    )
    assert line(said, "learning rate by samples: ") == (
        "learning rate by samples: 0 0 (start), 16 0.01 (warm-up ends), 48 0.005 (half-way through the decay),"
        " 80 0 (decay ends)"
    )
    assert [line.split()[0] for line in said if re.match("weights|embeddings|norms", line)] == [
        "weights",
        "embeddings",
        "norms",
    ]
    assert "compiled: off; activations kept" in said
    assert "GradClip(max_norm=0.5" in line(said, "callbacks: ")
    assert "AccumulationWindows(global_batch=8, micro_batch=2); " in line(said, "callbacks: ")
    assert "position: step 0, 0 samples, 0 tokens" in said
    assert f"initial weights: {tensors} tensors measured, 0 not as declared" in said


def built() -> torch.nn.Module:
    from lit_stable.model.gpt import GPT

    return GPT(tiny_module().config)


def test_one_line_for_the_first_step_each_logging_step_and_the_last(said):
    steps = [text for text in said if text.startswith("step ")]
    assert [text.split(" | ")[0] for text in steps] == ["step 1/5", "step 2/5", "step 4/5", "step 5/5"]
    pattern = (
        r"step 2/5 \| loss 4\.\d{4} \| lr 0.005 \| grad norm [\d.]+ \| [\d.]+k? tokens/s"
        rf" \| {2 * GLOBAL_BATCH * LENGTH} tokens"
    )
    assert re.fullmatch(pattern, steps[1]), steps[1]


def test_the_rate_in_a_line_is_the_one_that_the_step_used(said):
    rates = [float(re.search(r"lr ([\d.]+)", text)[1]) for text in said if text.startswith("step ")]
    assert rates == [0, 0.005, pytest.approx(0.1 * own_rate(3), rel=1e-6), pytest.approx(0.1 * own_rate(4), rel=1e-6)]


def own_rate(steps: int) -> float:
    """Of the schedule, after so many steps."""
    return tiny_module().schedule.rate(Mark(steps, steps * GLOBAL_BATCH, 0))


def test_a_loss_that_is_lost_is_said_once_until_it_is_found_again(monkeypatch):
    said, report = [], Report("go on")
    monkeypatch.setattr("lit_stable.run.report.say", said.append)
    report._clock.start(0)
    for step, loss in enumerate([4.0, math.nan, math.inf, 5.0, math.nan], 1):
        report._tell(step, "/5", "0.1", 10 * step, {"loss": loss, "skipped": 0})
    assert [text.split(";")[0] for text in said if "are kept from here on" in text] == [
        *("step 2: the loss is nan", "step 5: the loss is nan")
    ]


def test_a_validation_is_one_line_for_each_set(said):
    text = line(said, "  validation 0: ")
    loss, perplexity = map(float, re.fullmatch(r"  validation 0: loss ([\d.]+), perplexity ([\d.]+)", text).groups())
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)


def test_the_closing_table_sums_up(said):
    table = dict(re.split(r"  +", text, maxsplit=1) for text in said[said.index("") + 1 :] if "  " in text.strip())
    assert table["steps"] == "5 (0 skipped)"
    assert table["tokens"] == f"{5 * GLOBAL_BATCH * LENGTH:,}"
    assert re.fullmatch(r"\d+\.\d s", table["to the first line"])
    losses = [re.search(r"loss ([\d.]+)", text)[1] for text in said if text.startswith("step ")]
    assert table["loss, first and last"] == f"{losses[0]} at step 1 -> {losses[-1]} at step 5"
    assert re.fullmatch(r"[\d.]+ at step 5, NOT BELOW the unigram entropy 3\.5000", table["validation 0"])
    assert table["to go on"] == "lit-stable fit --resume auto"


def test_the_closing_table_names_the_steps_of_what_is_not_of_the_last_one(monkeypatch, tmp_path):
    lines: list[str] = []
    monkeypatch.setattr("lit_stable.run.report.say", lines.append)
    stop = Watch("on_train_batch_end", lambda trainer, *_: trainer.global_step == 4 and os.kill(os.getpid(), SIGTERM))
    fit(Report(""), steps=9, more=[stop, GracefulStop(str(tmp_path))], every=3, logged=3)
    assert "steps                 4 (0 skipped)" in lines[-1]
    assert re.search(r"loss, first and last  \S+ at step 1 -> \S+ at step 3\n", lines[-1])
    assert re.search(r"validation 0          \S+ at step 3, NOT BELOW", lines[-1])


def test_skipped_steps_are_shown(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("lit_stable.run.report.say", lines.append)

    skip = Watch("on_train_start", lambda trainer: Progress.of(trainer).note_skipped(True))
    fit(Report(""), steps=1, more=[skip])
    assert line(lines, "step 1/1").endswith(" | 1 skipped")
    assert "1 (1 skipped)" in lines[-1]


def test_weights_that_are_not_as_declared_are_listed(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("lit_stable.run.report.say", lines.append)
    spoil = Watch("on_fit_start", lambda trainer: torch.nn.init.normal_(trainer.lightning_module.gpt.wte.weight))
    fit(Report(""), steps=1, more=[spoil])
    assert line(lines, "initial weights: ").splitlines()[0].endswith(" tensors measured, 1 not as declared")
    assert "OFF wte.weight" in line(lines, "initial weights: ")


def test_the_report_remembers_the_first_loss_of_the_run():
    report = Report("")
    report.first_loss, report.first_step = 5.5, 1
    again = Report("")
    again.load_state_dict(report.state_dict())
    assert (again.first_loss, again.first_step) == (5.5, 1)
    again.load_state_dict({"first_loss": 4.5})  # of a checkpoint that does not tell
    assert (again.first_loss, again.first_step) == (4.5, None)


# -- the clock -------------------------------------------------------------------------------------------------------


@pytest.fixture
def wait(monkeypatch) -> Callable[[float], None]:
    """Let time pass for the clock."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.seconds)

    def wait(seconds: float) -> None:
        now.seconds += seconds

    return wait


def test_the_time_of_a_validation_is_no_training_time(wait, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("lit_stable.run.report.say", lines.append)
    train = Watch("on_train_batch_start", lambda trainer, *rest: wait(1))
    validate = Watch("on_validation_batch_start", lambda trainer, *rest: wait(1000))
    fit(Report(""), steps=4, more=[train, validate], every=2, logged=3)
    rates = [re.search(r"[^|]+ tokens/s", text)[0].strip() for text in lines if text.startswith("step ")]
    assert rates == [f"{GLOBAL_BATCH * LENGTH / (GLOBAL_BATCH / MICRO_BATCH):.3g} tokens/s"] * 3


def test_a_callback_is_described_by_the_settings_it_keeps():
    assert describe(AccumulationWindows(32, 8)) == "AccumulationWindows(global_batch=32, micro_batch=8)"
    assert "average_over='tokens'" in describe(AccumulationWindows(32, 8, average_over="tokens"))
    assert "average_over='micro_batches'" in describe(AccumulationWindows(32, 8), defaults=True)
    assert describe(Recovery()) == "Recovery()"
    rungs = [{"do": "wait", "steps": 7}, {"do": "stop"}]
    assert describe(Recovery(rungs, keep=2)).startswith(
        "Recovery(rungs=[Rung(do='wait', steps=7), Rung(do='stop')], triggers={"
    )
    assert describe(LearningRateMonitor(logging_interval="step")) == "LearningRateMonitor(logging_interval='step')"
