"""What was found in a run, in words: a person who is woken by it should read numbers that say what they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Scalars by the name that a sentence gives them; others keep their own.
SIGNALS = {"grad_norm": "the gradient norm", "loss": "the loss"}
#: By kind of event: what it found, in the words of the first that has all its numbers.
_WORDS = {
    "spike": ["{signal} is {value}, above its limit of {limit}"],
    "not_finite": ["{signal} is {value}"],
    "slow_divergence": ["the loss has risen slowly, from a median of {best} at step {best_step} to {median_loss}"],
    "plateau": ["the validation loss is {val_loss}, no better than {best} at step {best_step}; training {train_loss}"],
    "low_loss": ["the loss is {loss}, below its limit of {limit}"],
    "loss_scale_collapse": [
        "the loss scale is {loss_scale}, after {halvings} halvings",
        "the loss scale is {loss_scale}, and {overflows} steps in a row have overflowed",
        "the loss scale is {loss_scale}, below its floor of {floor}",
    ],
    "surge": ["{signal} has grown steadily, from {before} to {value}"],
    "too_many_skips": ["more than {max_skips} steps in a row had to be skipped"],
}


def in_words(kind: str, evidence: Mapping[str, Any]) -> str:
    """The evidence of an event as part of a sentence; empty where there is none."""
    told = {key: as_text(value) for key, value in evidence.items()}
    if "signal" in told:
        told["signal"] = SIGNALS.get(told["signal"], told["signal"])
    for words in _WORDS.get(kind, ()):
        try:
            return words.format(**told)
        except KeyError:  # told by somebody else, or by an older version
            continue
    return ", ".join(f"{key.replace('_', ' ')} {text}" for key, text in told.items())


def as_text(value: Any) -> str:
    """A value for people: four digits of what is measured, all of what is counted."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {as_text(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return " and ".join(map(as_text, value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)
