"""What a person reads who is woken by the recovery ladder."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from recovery_project import Data, Module, make_trainer, poison

from lit_stable.callbacks import Event, GradClip, Recovery, fit_with_recovery
from lit_stable.callbacks.evidence_words import in_words
from lit_stable.callbacks.recovery_exit import RecoveryStopped
from lit_stable.callbacks.recovery_ledger import Entry
from lit_stable.callbacks.recovery_words import sentence

pytestmark = pytest.mark.filterwarnings("ignore:Recovery", "ignore:step ")
SPIKE = {"signal": "loss", "value": 8.3127, "limit": 5.5}
#: Fields of a line, and its sentence.
LINES: list[tuple[dict[str, Any], str]] = [
    ({"action": "start"}, "the run begins"),
    (
        {"action": "checkpoint", "done": {"path": "a.ckpt", "healthy": True, "loss_in_band": True}},
        "a.ckpt is saved, healthy",
    ),
    (
        {"action": "checkpoint", "done": {"path": "a.ckpt", "loss_in_band": False, "no_trouble": False}},
        "a.ckpt is saved, not healthy: the loss is out of its band, trouble is under way",
    ),
    (
        {"action": "wait", "why": "spike", "evidence": SPIKE, "done": {"rung": 1, "criterion": "x"}},
        "spike: the loss is 8.313, above its limit of 5.5; nothing is changed (rung 1)",
    ),
    ({"action": "wait", "why": "spike", "done": {"rung": 1, "acted": False}}, "spike; nothing is changed (rung 1)"),
    (
        {
            "action": "skip",
            "why": "not_finite",
            "evidence": {**SPIKE, "value": "nan"},
            "done": {"rung": 2, "until": 16},
        },
        "not finite: the loss is nan; steps 7 to 16 change nothing, so that their data pass by (rung 2)",
    ),
    (
        {
            "action": "lr",
            "why": "spike",
            "evidence": {"not_back_after": 100, "level": 2.5},
            "done": {"rung": 2, "factor": 0.9, "acted": True},
        },
        "spike: 100 steps later the loss is not back at 2.5; from step 7 on the learning rate is multiplied by 0.9"
        " (rung 2)",
    ),
    (
        {
            "action": "lr",
            "why": "spike",
            "evidence": {"not_back_after": 100, "level": math.inf},
            "done": {"rung": 2, "factor": 0.9, "acted": False},
        },
        "spike: 100 steps later there are no five finite losses in a row; not done, since action is log: from step 7 on"
        " the learning rate is multiplied by 0.9 (rung 2)",
    ),
    (
        {
            "action": "rewind",
            "why": "too_many_skips",
            "evidence": {"max_skips": 5},
            "done": {"rung": 3, "to": 4, "path": "a.ckpt", "after": 2, "dropped": [[8, 20], [24, 28]]},
        },
        "too many skips: more than 5 steps in a row had to be skipped; the run goes back to step 4, a.ckpt (rung 3),"
        " and past samples 8 to 19 and 24 to 27, which leave it for good",
    ),
    (
        {
            "action": "rewind",
            "why": "hang",
            "evidence": {"host": "a", "ranks": [0, 1]},
            "done": {
                "rung": 3,
                "to": 4,
                "path": "a.ckpt",
                "after": 0,
                "factor": 0.5,
                "clip": 0.1,
                "reshuffled": [[1, 2]],
            },
        },
        "hang: host a, ranks 0 and 1; the run goes back to step 4, a.ckpt (rung 3); from there on the learning rate is"
        " multiplied by 0.5, gradients are clipped to a norm of 0.1, what is still to be read comes in another order",
    ),
    ({"action": "begun", "done": {"branch": 1}}, "branch 1 begins"),
    (
        {"action": "stop", "why": "spike", "evidence": {**SPIKE, "no_rewind": "there is none"}, "done": {"rung": 4}},
        "spike: the loss is 8.313, above its limit of 5.5, and a rewind was passed over: there is none; the ladder has"
        " come to its end, and the run is stopped",
    ),
    (
        {"action": "result", "evidence": {"level": 2.5, "steps": 6}, "done": {"of": 1, "result": "recovered"}},
        "recovered on rung 1: the loss is back at its level of 2.5, 6 steps after the first bad one; the run goes on",
    ),
    (
        {
            "action": "result",
            "evidence": {"level": "inf", "steps": 6},
            "done": {"of": 1, "result": "recovered", "acted": False},
        },
        "recovered on rung 1: the last five losses are finite, 6 steps after the first bad one; the run goes on; action"
        " is log: nothing was done",
    ),
    (
        {"action": "result", "done": {"of": 3, "result": "past the window", "rewind": 11}},
        "past the window that line 11 of the ledger went back for; the run goes on",
    ),
    ({"action": "go_on"}, "the run goes on after the end of its ladder, with new budgets"),
]


@pytest.mark.parametrize(("fields", "expected"), LINES, ids=[f"{i}-{f['action']}" for i, (f, _) in enumerate(LINES)])
def test_a_line_is_a_sentence_for_people(fields: dict[str, Any], expected: str) -> None:
    assert sentence(Entry(3, "a", 0, 6, **fields)) == f"step 6: {expected}"


@pytest.mark.parametrize(
    ("kind", "evidence", "expected"),
    [
        ("spike", {"signal": "grad_norm", "value": 8.0, "limit": 5.0}, "the gradient norm is 8, above its limit of 5"),
        (
            "slow_divergence",
            {"median_loss": 2.9, "best": 2.5, "best_step": 123456.0},
            "the loss has risen slowly, from a median of 2.5 at step 123456 to 2.9",
        ),
        (
            "plateau",
            {"val_loss": 2.5, "best": 2.49, "best_step": 800.0, "train_loss": 2.3, "gap": 0.2, "gap_at_best": 0.1},
            "the validation loss is 2.5, no better than 2.49 at step 800; training 2.3",
        ),
        ("low_loss", {"loss": 0.9, "limit": 2.0}, "the loss is 0.9, below its limit of 2"),
        ("loss_scale_collapse", {"loss_scale": 65536.0, "halvings": 6.0}, "the loss scale is 65536, after 6 halvings"),
        (
            "loss_scale_collapse",
            {"loss_scale": 1.0, "overflows": 20.0},
            "the loss scale is 1, and 20 steps in a row have overflowed",
        ),
        ("loss_scale_collapse", {"loss_scale": 0.5, "floor": 1.0}, "the loss scale is 0.5, below its floor of 1"),
        (
            "surge",
            {"signal": "stability/log_z", "value": 5.0, "before": 2.0},
            "stability/log_z has grown steadily, from 2 to 5",
        ),
        ("spike", {"value": math.nan}, "value nan"),
        ("slow_step", {"usual_seconds": 0.25, "late": {"rank": 1}}, "usual seconds 0.25, late rank 1"),
        ("spike", {}, ""),
    ],
)
def test_what_was_found_is_said_in_words(kind: str, evidence: dict[str, Any], expected: str) -> None:
    assert in_words(kind, evidence) == expected
    end = f": {expected}" if expected else ""
    assert Event(3, kind, evidence).sentence() == f"step 3: {kind.replace('_', ' ')}{end}"


def told(folder: Path, module: Module, recovery: Recovery, steps: int = 60) -> list[str]:
    """What a run says of its ladder."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit_with_recovery(make_trainer(folder, steps, GradClip(1.0), recovery=recovery), module, Data())
    return [text for text in (str(warning.message) for warning in said) if text.startswith("Recovery: step")]


def ladder(**options: Any) -> Recovery:
    rungs: list[Any] = [
        {"do": "wait", "steps": 5, "within": 0.0},
        {"do": "skip", "skip_steps": 3, "steps": 5},
        {"do": "lr", "factor": 0.5, "steps": 5},
        {"do": "lr", "factor": 0.5, "floor": 0.5, "steps": 5},  # at its floor after the one before
        {"do": "rewind", "max_times": 1, "before": 0, "after": 1},
        {"do": "stop"},
    ]
    return Recovery(rungs, {"spike": "wait"}, **options)


@pytest.mark.parametrize("action", ["act", "log"])
def test_each_says_when_it_is_over_and_what_comes_next(action: Any, tmp_path: Path) -> None:
    lines = told(tmp_path, Module(poison(*range(20, 40)), factor=1e4), ladder(action=action), 36)[:4]
    ends = [
        r"it is over with a median of 5 losses <= 0\.\d+ within 5 steps, else 3 steps are skipped \(rung 2\)\.",
        r"it is over with a median of 5 losses <= \d\.\d+ within 5 steps, else the learning rate is cut \(rung 3\)\.",
        r"within 5 steps, else the run goes back to a healthy checkpoint \(rung 5\)\.",
        r"rewind 1 of at most 1 on this rung, after which the run is stopped\.",
    ]
    for line, end in zip(lines, ends, strict=True):
        assert re.search(end + "$", line), line
        assert not re.search(r"[{}\[\]_]|\(\)|: ;", line.replace(str(tmp_path), "")), line


def test_a_rewind_that_may_come_again_says_how_far_it_then_goes(tmp_path: Path) -> None:
    recovery = Recovery([{"do": "rewind", "before": 0, "after": 2, "factor": 0.5}, {"do": "stop"}])
    first, past = told(tmp_path, Module(poison(17)), recovery, 24)
    assert first.endswith("; rewind 1 of at most 10 on this rung; another up to step 19 goes further back.")
    assert past.endswith("; the run goes on; the learning rate stays at 0.5 of its schedule's.")


def test_a_run_that_is_stopped_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 20, recovery=Recovery([{"do": "rewind", "to": 77}, {"do": "stop"}]))
    with pytest.raises(RecoveryStopped) as stopped:
        fit_with_recovery(trainer, Module(poison(12)), Data())
    assert str(stopped.value) == (
        "step 12: not finite: the loss is nan, and a rewind was passed over: there is no checkpoint of step 77; the"
        f" ladder has come to its end, and the run is stopped; the ledger is {tmp_path / 'recovery.jsonl'}; to go on"
        " all the same, give Recovery(after_stop='go_on') (--stability.recovery.after_stop go_on)."
    )
