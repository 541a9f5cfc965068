"""Change the learning rate, and other optimizer options, of a run under way: once, on the record, and exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .base import MisconfigurationException, StabilityCallback, is_logging_step, log_number, rank_zero_info
from .configured import Configured, settle
from .dropout_rate import DropoutRate
from .events import Event, Events, emit
from .grad_clip import GradClip
from .learning_rate import EffectiveLR, Modifier
from .one_cycle import let_cycles_end, undo
from .override_arguments import option_problems
from .progress import Mark, Progress
from .rate_change import RateChange
from .scheduler_settings import groups, plain

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LROverride(StabilityCallback):
    """Override the learning rate, weight decay, betas, eps, dropout or clipping norm from a point of a run on.

    Over any scheduler, or a LightningModule that sets its own rate: the effective value stands in the optimizer for the
    step alone (see ``EffectiveLR``), so it beats what a checkpoint restored, holds for every later step, is the same
    after any number of resumes, and keeps the ratios between groups. Counters, data and batch size are not touched.
    Take the callback away, or change its arguments, and a resume goes on from the schedule's own rate.

    Where it begins: at ``start``, or without one where the fit begins that has it first, which the checkpoint records;
    other arguments are another override, which begins anew. What it does to the rate (see ``RateChange`` for the
    formulas) is one of: ``factor``; ``peak`` and/or ``floor``; ``horizon``, a new schedule; ``schedule``, its points.

    On resume, hyper-parameters of the learning rate that the code now has otherwise than the checkpoint (base rates, a
    scheduler's horizon or factors, the function of a ``LambdaLR`` if the checkpoint had this callback) obey
    ``on_conflict``: ``error`` refuses; ``override`` rebuilds the schedulers as the code has them, at the step where
    they stand; ``checkpoint`` keeps the old ones. Other options of the optimizer always come from the code, and are
    printed old -> new. A ``OneCycleLR`` past its end stays at its last rate instead of raising. ``clip`` holds for
    ``GradClip`` whatever its own norm or schedule says (a norm by stages known from the start belongs there).

    Its first step is an event of kind ``lr_override`` (see :class:`~.events.Events`), with old and new values; a resume
    prints the line again, and is no event.

    ``action="log"``: nothing is changed; what would have been is printed and logged, and is the event. Of a resume that
    acts the first step is the event again.

    Logged at logging steps: ``stability/override_lr`` (the rate that this override asks for the first group: before it
    begins the schedule's own); ``stability/lr`` and ``stability/lr_factor`` (by ``EffectiveLR``: what the step used).

    Resumes: the checkpoint holds where it began, whether that was told, and the configured hyper-parameters.

    Source: Megatron-LM ``--override-opt_param-scheduler``; BloombergGPT, arXiv:2303.17564, appendix C (factors in
    mid-run); BLOOM chronicles, tr8b-104B (horizon and floor on resume).

    Args:
        start: First progress that is overridden, in ``unit``, >= 0; ``None``: where the fit begins.
        unit: Of ``start`` and all lengths: optimizer ``steps``, ``samples`` or ``tokens``.
        factor: The rate times that, >= 0.
        peak: The schedule's peak becomes this rate, > 0; of several groups the highest.
        floor: Lowest rate, >= 0; with ``horizon`` the one that the decay ends at (0 by default).
        horizon: End of a new schedule, counted from the start of the run, in ``unit``.
        warmup: Length of the new schedule's linear rise from 0, likewise.
        shape: How the new schedule falls: ``cosine`` or ``linear``.
        schedule: The whole new schedule as [progress, rate] points with straight lines between them.
        weight_decay: New value, >= 0, of the groups that decay; the others stay at 0.
        betas: Adam's decay rates, each in [0, 1).
        eps: Adam's eps, > 0.
        dropout: New rate of every dropout module, in [0, 1).
        clip: New largest gradient norm of ``GradClip``, > 0.
        on_conflict: See above.
        action: ``act``, or ``log`` alone.

    Raises:
        MisconfigurationException: when arguments are wrong (all of them at once) or change nothing, when no group has
            the option to change or no ``GradClip`` is there, when a rate cannot be scaled, or on a conflict.

    Example::

        >>> Trainer(callbacks=[LROverride(start=115_500, factor=2 / 3)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 15

    def __init__(
        self,
        start: int | None = None,
        unit: Literal["steps", "samples", "tokens"] = "steps",
        factor: float | None = None,
        peak: float | None = None,
        floor: float | None = None,
        horizon: int | None = None,
        warmup: int = 0,
        shape: Literal["cosine", "linear"] = "cosine",
        schedule: list[tuple[float, float]] | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        dropout: float | None = None,
        clip: float | None = None,
        on_conflict: Literal["error", "override", "checkpoint"] = "error",
        action: Literal["act", "log"] = "act",
    ) -> None:
        self.start, self.unit, self.on_conflict, self.action = start, unit, on_conflict, action
        self.change = RateChange(factor, peak, floor, horizon, warmup, shape, schedule)
        self.options = {"weight_decay": weight_decay, "betas": None if betas is None else tuple(betas), "eps": eps}
        self.dropout = None if dropout is None else DropoutRate(dropout)
        self.clip = clip
        problems = [*self.change.problems(), *option_problems(start, weight_decay, betas, eps, dropout, clip)]
        if not self.change.changes_the_rate and {dropout, clip, *self.options.values()} == {None}:
            problems.append("nothing to override; give factor, peak, floor, horizon, schedule or an option.")
        if problems:
            raise MisconfigurationException("\n".join(f"`LROverride`: {problem}" for problem in problems))
        values = (start, unit, factor, peak, floor, horizon, warmup, shape, schedule, *self.options.values())
        self._settings = repr([plain(value) for value in (*values, dropout, clip)])
        self._begun: Mark | None = None
        self._recorded: dict[str, Any] | None = None  # what the run follows and no scheduler saves, by name
        self._configured: Configured | None = None
        self._bases: list[float] = []
        self._asked: dict[int, float] = {}
        self._cycles: list[Any] = []
        self._clip: GradClip | None = None
        self._announced = False  # in this fit
        self._told = False  # as an event, in this run
        self._acted = False  # whether that event was of a step that was overridden

    # -- set up ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        Progress.of(trainer)
        Events.of(trainer)
        self.modify(EffectiveLR.of(trainer))
        self.modify_clip(trainer.callbacks)  # type: ignore[attr-defined]

    def modify(self, effective: EffectiveLR) -> None:
        """Add what the override does to learning rates and options: pure functions of progress, once it has begun."""
        effective.add("LROverride", self._rate, replaces=self.change.replaces)
        for key, value in self.options.items():
            if value is not None and self.action == "act":
                effective.add_option("LROverride", key, self._option(key, value), replaces=True)

    def modify_clip(self, callbacks: Iterable[Any]) -> None:
        """Add what the override does to the largest norm of the `GradClip` among these, if anything."""
        if self.clip is None or self.action == "log":
            return
        self._clip = next((c for c in callbacks if isinstance(c, GradClip)), None)
        if self._clip is None:
            raise MisconfigurationException(
                f"`LROverride(clip={self.clip})`: no `GradClip` is among the callbacks, so nothing clips; add one, with"
                " the norm that held before."
            )
        self._clip.overriding = lambda mark: self.clip if self.is_active(mark) else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.action == "act":  # before anything steps a scheduler, as a rebuilding one does
            self._cycles = let_cycles_end(trainer)
        self._configured = Configured(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._configured is not None
        for key, value in self.options.items():
            if value is not None and not any(_applies(key, group) for group in groups(trainer)):
                raise MisconfigurationException(
                    f"`LROverride({key}={value})`: no parameter group has a {key} to change; leave it out."
                )
        if self.dropout is not None:
            self.dropout.find(pl_module)
        self._recorded = settle(trainer, self._configured, self._recorded, self.on_conflict, self.action == "act")
        fallback = self._configured.lrs
        if self.on_conflict == "checkpoint":
            fallback = [(self._recorded or {}).get(f"group {i} lr", lr) for i, lr in enumerate(fallback)]
        bases = [
            float(group.get("max_lr", group.get("initial_lr", lr)))
            for group, lr in zip(groups(trainer), fallback, strict=True)
        ]
        self.begin(self._begun or Progress.of(trainer).mark, bases)
        if self.change.changes_the_rate and not self._bases:
            raise MisconfigurationException(
                "`LROverride`: configure_optimizers returned no optimizer, so there is no rate to change; leave the"
                " callback out."
            )
        if self.change.changes_the_rate and max(self._bases) <= 0:
            raise MisconfigurationException(
                f"`LROverride`: the optimizer's own rates are {self._bases}, which no override can keep the ratios of;"
                " make the optimizer with its peak rate."
            )
        self._announced = False

    def begin(self, mark: Mark | None, bases: list[float]) -> None:
        """Begin at these counters, unless ``start`` says where; ``None``: not yet. ``bases``: each group's own peak."""
        self._begun, self._bases = mark, bases

    # -- steps -------------------------------------------------------------------------------------------------------

    def is_active(self, mark: Mark) -> bool:
        """Whether the step that opened at these counters is overridden."""
        begin = self.start
        if begin is None:
            if self._begun is None:
                return False
            begin = getattr(self._begun, self.unit)
        return bool(getattr(mark, self.unit) >= begin)

    def _rate(self, mark: Mark, lr: float, group: int) -> float:
        asked = lr
        if self.is_active(mark) and self.change.changes_the_rate:
            asked = self.change.rate(getattr(mark, self.unit), lr, self._bases[group], max(self._bases))
        self._asked[group] = asked
        return asked if self.action == "act" else lr

    def _option(self, key: str, value: Any) -> Modifier:
        def option(mark: Mark, own: Any, group: int) -> Any:
            return value if self.is_active(mark) and _applies(key, {key: own}) else own

        return option

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.dropout is not None and self.action == "act" and self.is_active(Progress.of(trainer).start):
            self.dropout.apply()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        effective, mark = EffectiveLR.of(trainer), Progress.of(trainer).start
        if not effective.used:  # no step in this batch
            return
        if is_logging_step(trainer):
            # Of several optimizers one may wait.
            log_number(pl_module, "stability/override_lr", self._asked[min(self._asked)])
        if self.is_active(mark) and not self._announced:
            self._announced = True
            self._announce(trainer, self._sentence(effective, mark), mark)

    def _announce(self, trainer: Trainer, text: str, mark: Mark) -> None:
        """Tell of the first overridden step of this fit; of the run's as an event."""
        if self._told:
            rank_zero_info(text)
            return
        self._told, self._acted = True, self.action == "act"
        evidence = {self.unit: getattr(mark, self.unit), "acted": self._acted}
        emit(trainer, Event(mark.steps + 1, "lr_override", evidence, text=text), warns=False)

    def _sentence(self, effective: EffectiveLR, mark: Mark) -> str:
        """Old -> new, read back from the optimizer where it acted."""
        acts, parts = self.action == "act", []
        if self.change.changes_the_rate:
            parts.append(
                f"lr {effective.own['lr'][0]:.7g} -> {effective.used['lr'][0] if acts else self._asked[0]:.7g}"
            )
        for key, value in self.options.items():
            if value is not None:
                parts.append(f"{key} {effective.own[key]} -> {effective.used[key]}" if acts else f"{key} -> {value}")
        if self.dropout is not None:
            parts.append(f"dropout {self.dropout.own} -> {self.dropout.p}")
        if self.clip is not None:
            own = "" if self._clip is None else f"{self._clip.own_cap(mark)} "
            parts.append(f"clip {own}-> {self.clip}")
        verb = "overrides" if acts else "would override"
        return f"LROverride: at {getattr(mark, self.unit)} {self.unit} {verb} {', '.join(parts)}"

    # -- tear down, state --------------------------------------------------------------------------------------------

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        EffectiveLR.of(trainer).remove("LROverride")
        undo(self._cycles)
        self._cycles = []
        if self.dropout is not None:
            self.dropout.restore()
        if self._clip is not None:
            self._clip.overriding = None
        self._clip = None

    def state_dict(self) -> dict[str, Any]:
        begun = None if self._begun is None else list(self._begun)
        told = {"told": self._told, "acted": self._acted}
        return {"settings": self._settings, "begun": begun, "recorded": self._recorded, **told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._recorded = state_dict["recorded"]
        same = state_dict["settings"] == self._settings and state_dict["begun"] is not None
        self._begun = Mark(*state_dict["begun"]) if same else None
        told = same and bool(state_dict.get("told"))
        self._acted = told and bool(state_dict.get("acted", True))  # older states do not tell
        self._told = told and (self._acted or self.action == "log")


def _applies(key: str, group: dict[str, Any]) -> bool:
    """Whether a group has the option; one that is not decayed never is."""
    return key in group and (key != "weight_decay" or group[key] > 0)
