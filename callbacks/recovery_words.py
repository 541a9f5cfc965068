"""Lines of the recovery ledger as sentences, for a person who is woken by one: what happened, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .evidence_words import as_text, in_words
from .recovery_ledger import Entry
from .recovery_rungs import Rung

#: How to go on with a run that the ladder has ended.
TO_GO_ON = "Recovery(after_stop='go_on') (--stability.recovery.after_stop go_on)"

#: What each judgement of a checkpoint that failed says.
_UNHEALTHY = {
    "loss_in_band": "the loss is out of its band",
    "no_trouble": "trouble is under way",
    "loss_scale_at_least_1": "the loss scale is below 1",
    "activations_not_rising": "activations are rising",
}
#: What a rewind changes for good, by option.
_IN_FORCE = {
    "factor": "the learning rate is multiplied by {}",
    "weight_decay": "weight decay is {}",
    "dropout": "dropout is {}",
    "clip": "gradients are clipped to a norm of {}",
    "reset_optimizer": "the optimizer's moments begin at zero",
    "reshuffled": "what is still to be read comes in another order",
}


def sentence(entry: Entry) -> str:
    """A line of the ledger, without a full stop."""
    deed = _DEEDS[entry.action](entry) if entry.action in _DEEDS else entry.action
    if not entry.is_done and entry.action != "wait":
        deed = f"not done, since action is log: {deed}" if entry.why else f"{deed}; action is log: nothing was done"
    return "; ".join([f"step {entry.step}: {reason(entry)}", deed] if entry.why else [f"step {entry.step}: {deed}"])


def reason(entry: Entry) -> str:
    """What a line answers, with its numbers."""
    evidence = dict(entry.evidence)
    no_rewind = evidence.pop("no_rewind", None)
    if "not_back_after" in evidence:
        level, after = as_text(evidence.get("level")), evidence["not_back_after"]
        told = f"{after} steps later the loss is not back at {level}"
        if level == "inf":  # there was no level yet
            told = f"{after} steps later there are no five finite losses in a row"
    else:
        told = in_words(entry.why, evidence)
    passed_over = "" if no_rewind is None else f", and a rewind was passed over: {no_rewind}"
    return f"{entry.why.replace('_', ' ')}{': ' if told else ''}{told}{passed_over}"


def _rung(entry: Entry) -> str:
    return f" (rung {entry.done['rung']})" if "rung" in entry.done else ""


def _skip(entry: Entry) -> str:
    return f"steps {entry.step + 1} to {entry.done['until']} change nothing, so that their data pass by{_rung(entry)}"


def _lr(entry: Entry) -> str:
    factor = as_text(entry.done["factor"])
    return f"from step {entry.step + 1} on the learning rate is multiplied by {factor}{_rung(entry)}"


def _rewind(entry: Entry) -> str:
    done = entry.done
    told = f"the run goes back to step {done['to']}, {done['path']}{_rung(entry)}"
    if "dropped" in done:
        told += f", and past samples {_listed(done['dropped'])}, which leave it for good"
    in_force = [words.format(as_text(done[name])) for name, words in _IN_FORCE.items() if done.get(name) is not None]
    return told + (f"; from there on {', '.join(in_force)}" if in_force else "")


def _listed(ranges: Sequence[Sequence[int]]) -> str:
    return " and ".join(f"{first} to {stop - 1}" for first, stop in ranges)


def _result(entry: Entry) -> str:
    if "rewind" in entry.done:
        return f"past the window that line {entry.done['rewind']} of the ledger went back for; the run goes on"
    level, steps = as_text(entry.evidence.get("level")), entry.evidence.get("steps")
    back = "the last five losses are finite" if level == "inf" else f"the loss is back at its level of {level}"
    since = "" if steps is None else f", {steps} steps after the first bad one"
    return f"recovered on rung {entry.done.get('of')}: {back}{since}; the run goes on"


def _checkpoint(entry: Entry) -> str:
    bad = [words for name, words in _UNHEALTHY.items() if entry.done.get(name) is False]
    return f"{entry.done['path']} is saved, {'not healthy: ' + ', '.join(bad) if bad else 'healthy'}"


_DEEDS: dict[str, Callable[[Entry], str]] = {
    "start": lambda entry: "the run begins",
    "checkpoint": _checkpoint,
    "wait": lambda entry: f"nothing is changed{_rung(entry)}",
    "skip": _skip,
    "lr": _lr,
    "rewind": _rewind,
    "begun": lambda entry: f"branch {entry.done.get('branch', entry.branch)} begins",
    "stop": lambda entry: "the ladder has come to its end, and the run is stopped",
    "result": _result,
    "go_on": lambda entry: "the run goes on after the end of its ladder, with new budgets",
}


# -- what comes next -------------------------------------------------------------------------------------------------


def next_rung(rung: Rung | None, place: int) -> str:
    """What follows if a remedy does not help; ``None``: no rung is left. ``place``: from 1."""
    if rung is None or rung.do == "stop":
        return "the run is stopped"
    told = {
        "wait": "the run is watched on",
        "skip": f"{rung.skip_steps} steps are skipped",
        "lr": "the learning rate is cut",
        "rewind": f"the run goes back to {'a healthy checkpoint' if rung.to is None else f'step {rung.to}'}",
    }
    return f"{told[rung.do]} (rung {place})"


def unless_over(criterion: str, then: str) -> str:
    """When trouble counts as over, and what follows if it does not."""
    return f"it is over with {'a ' if criterion.startswith('median') else ''}{criterion}, else {then}"


def how_to_go_on(ledger: Path) -> str:
    """What to do about a run that was stopped."""
    return f"the ledger is {ledger}; to go on all the same, give {TO_GO_ON}"
