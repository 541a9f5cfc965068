"""Lower the learning rate a little whenever a run shows the first sign of trouble."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .base import StabilityCallback, is_logging_step, log_number, rank_zero_warn, refuse_all
from .event_ring import LAG
from .events import Event, Events
from .learning_rate import EffectiveLR
from .progress import Progress

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LRBackoff(StabilityCallback):
    """Multiply the learning rate by ``factor`` at each event of the run, not sooner than ``cooldown`` steps after the
    last cut, and never below ``floor``.

    Events are those of :class:`~.detectors.Detectors` or of any other callback (see :func:`~.events.emit`). A cut holds
    for every later step, over any scheduler (see ``EffectiveLR``), and after any resume. It is announced in one line.
    :class:`~.recovery.Recovery` has the same as one rung among others; use one of the two.

    The same on all ranks: events that one rank alone knows of are passed over. On CUDA a cut falls 4 steps after its
    event, also when the event was known before.

    Logged at logging steps: ``stability/backoff_factor`` (what the rate is multiplied by).

    Source: OPT-175B logbook (Zhang et al. 2022, arXiv:2205.01068): the rate lowered when gradient and activation norms
    rose, once by a tenth.

    Args:
        kinds: Which kinds of event, as shell patterns separated by blanks.
        signals: Of these, the ones about one of these scalars alone, such as ``grad_norm``; ``None``: all.
        factor: In (0, 1).
        cooldown: Optimizer steps, >= 0.
        floor: All cuts together go no lower than this fraction of the schedule's rate, in [0, 1).
        action: ``act``, or ``log``: cuts are announced and logged, and not made: not by a resume that acts either.

    Raises:
        MisconfigurationException: when a number is out of range.

    Example::

        >>> Trainer(callbacks=[Detectors(), LRBackoff(factor=0.9)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 79  # after the detectors

    def __init__(
        self,
        kinds: str = "spike slow_divergence surge",
        signals: list[str] | None = None,
        factor: float = 0.9,
        cooldown: int = 100,
        floor: float = 0.1,
        action: Literal["act", "log"] = "act",
    ) -> None:
        rules = [
            ("factor", factor, 0 < factor < 1, "must lie between 0 and 1"),
            ("cooldown", cooldown, cooldown >= 0, "must be 0 or more"),
            ("floor", floor, 0 <= floor < 1, "must be at least 0 and below 1"),
        ]
        refuse_all(f"`LRBackoff({name}={value})`: {rule}." for name, value, holds, rule in rules if not holds)
        self.kinds, self.signals, self.factor = kinds, signals, factor
        self.cooldown, self.floor, self.action = cooldown, floor, action
        self.rate_factor = 1.0
        self._last_cut: int | None = None
        self._made: tuple[float, int | None] = (1.0, None)  # both of the cuts that were not only logged
        self._events: list[Event] = []  # not answered yet
        self._steps = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        Progress.of(trainer)
        Events.of(trainer).listeners["lr_backoff"] = self._hear
        effective = EffectiveLR.of(trainer)
        if self.action == "act":
            effective.add("LRBackoff", lambda mark, lr, group: lr * self.rate_factor)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = Progress.of(trainer).steps

    def _hear(self, event: Event) -> None:
        concerns = self.signals is None or event.evidence.get("signal") in self.signals
        if event.rank is None and concerns and any(fnmatchcase(event.kind, one) for one in self.kinds.split()):
            self._events.append(event)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        steps = Progress.of(trainer).steps
        if steps == self._steps:  # within a window
            return
        self._steps = steps
        lag = LAG if trainer.strategy.root_device.type == "cuda" else 0
        due = [event for event in self._events if event.step + lag <= steps]
        self._events = [event for event in self._events if event.step + lag > steps]
        if due:
            self._cut(steps, due[0])
        if is_logging_step(trainer):
            log_number(pl_module, "stability/backoff_factor", self.rate_factor)

    def _cut(self, step: int, event: Event) -> None:
        cools = self._last_cut is not None and step - self._last_cut < self.cooldown
        lower = max(self.floor, self.rate_factor * self.factor)
        if cools or lower == self.rate_factor:
            return
        verb = "is" if self.action == "act" else "would be"
        rank_zero_warn(
            f"LRBackoff: {event.sentence()}; from step {step + 1} on the learning rate {verb} {lower:.4g} times the"
            f" schedule's (was {self.rate_factor:.4g})."
        )
        self.rate_factor, self._last_cut = lower, step
        if self.action == "act":
            self._made = lower, step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        Events.of(trainer).listeners.pop("lr_backoff", None)
        EffectiveLR.of(trainer).remove("LRBackoff")
        self._events = []

    def state_dict(self) -> dict[str, Any]:
        waiting = [asdict(event) for event in self._events]
        made = dict(zip(("factor", "last_cut"), self._made, strict=True))
        return {"factor": self.rate_factor, "last_cut": self._last_cut, "made": made, "events": waiting}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        made = state_dict.get("made", state_dict)  # older states do not tell
        self._made = float(made["factor"]), made["last_cut"]
        known = made if self.action == "act" else state_dict
        self.rate_factor, self._last_cut = float(known["factor"]), known["last_cut"]
        self._events = [Event(**event) for event in state_dict["events"]]
