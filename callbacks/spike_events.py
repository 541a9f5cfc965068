"""What the host learns of a spike: one record per event, and the error that ends a run of nothing but spikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .events import Event
from .spike_detector import CAUSES, OVERFLOW, Verdict

SIGNALS = {"grad_norm": "gradient norm", "loss": "loss"}


class SpikeEvent(NamedTuple):
    """One step that was judged a spike."""

    step: int
    """Optimizer step, counted from 1, skipped ones included."""
    norm: float
    """Global gradient norm, before clipping, unscaled."""
    loss: float | None
    """Loss of the step over all ranks; ``None`` where it is not judged."""
    threshold: float
    """The limit in force for the signal that was judged; inf during warm-up."""
    skipped: bool
    """False: accepted as the new normal, after too many skips in a row."""
    cause: str
    """``non_finite``, ``overflow``, ``threshold``, ``z_score`` or ``ratio``."""
    signal: str
    """What was judged: ``grad_norm`` or ``loss``."""
    stop: bool
    """Whether it is one skip too many in a row."""

    def sentence(self, acts: bool) -> str:
        """For people; ``acts`` = False: what would have been done."""
        value = self.norm if self.signal == "grad_norm" or self.loss is None else self.loss
        found = f"above {self.threshold:.4g} ({self.cause})" if math.isfinite(value) else f"not finite ({self.cause})"
        done = "skipped" if self.skipped else "accepted after too many skips in a row, statistics begin anew"
        done = done if acts else f"would have been {done}"
        end = "" if not self.stop else "; the run is stopped" if acts else "; the run would have been stopped"
        return f"step {self.step}: {done}: {SIGNALS[self.signal]} {value:.4g} is {found}{end}"

    def told(self, acts: bool, samples: Sequence[int]) -> Event:
        """The same for all who listen; ``samples``: first stream index of the step, and the one behind its last."""
        kind = "overflow" if self.cause == CAUSES[OVERFLOW] else "skipped_step" if self.skipped else "accepted_spike"
        evidence = {"signal": self.signal, "cause": self.cause, "norm": self.norm, "threshold": self.threshold}
        evidence.update({} if self.loss is None else {"loss": self.loss}, acted=acts)
        text = f"GradSpikeSkip: {self.sentence(acts)}"
        return Event(self.step, kind, evidence, list(samples), text=text)


class TooManySkips(RuntimeError):
    """More optimizer steps in a row had to be skipped than is allowed, and the next is not to be accepted."""

    def __init__(self, step: int, max_skips: int) -> None:
        super().__init__(
            f"step {step}: more than max_skips={max_skips} optimizer steps in a row were spikes or not finite; go back"
            " to an earlier checkpoint, with other data or a lower learning rate."
        )


def row(verdict: Verdict, norm: Tensor, loss: Tensor | None) -> Tensor:
    """A verdict as one (7,) fp32 tensor on its device, for :func:`event`."""
    cause, limit, _, signal = verdict.judgement
    parts = (norm, norm if loss is None else loss, limit, verdict.skip, cause, signal, verdict.stop)
    return torch.stack([part.to(torch.float32) for part in parts])


def event(step: int, numbers: Sequence[float], signals: Sequence[str]) -> SpikeEvent | None:
    """The event in a row of :func:`row`, if there is one; ``signals``: what was judged, in the detector's order."""
    norm, loss, limit, skip, cause, signal, stop = numbers
    if not cause:
        return None
    judged = loss if "loss" in signals else None
    return SpikeEvent(step, norm, judged, limit, bool(skip), CAUSES[int(cause)], signals[int(signal)], bool(stop))
