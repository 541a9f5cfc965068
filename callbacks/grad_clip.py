"""Clip gradients by their norm, global or of each part, on the device, under any strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from .ada_gc import AdaGC, RunningNorms
from .base import StabilityCallback, is_logging_step
from .clip_arguments import refuse_broken, refuse_flat_parameters, refuse_other_clipping
from .clip_parts import ClipParts, Scope
from .clip_schedule import ClipStage, check_stages, norm_at
from .device_step import clear_all, divide_gradients, hook_steps, skip_step
from .grad_norm import GradNorm, NormType
from .grad_spike_skip import GradSpikeSkip
from .part_statistics import PartStatistics
from .progress import Mark, Progress
from .scripted_skip import ScriptedSkip
from .z_clip import NormStatistics, ZClip

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GradClip(StabilityCallback):
    """Scale gradients down so that their norm is at most ``max_norm``: all together, or each part by its own norm.

    The factor is ``min(1, max_norm / norm)`` exactly (no epsilon), so an unclipped step is bit-identical to one
    without the callback. With one global norm and a fused optimizer the division happens inside its kernel; with
    parts, gradients are divided in place, which reads and writes each once more. Nothing waits for the device (but see
    "not finite"). Use it instead of ``Trainer(gradient_clip_val=...)``, which Lightning refuses under FSDP and which a
    skip decision could not see. Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.

    **Parts** (``scope``): the optimizer's groups, layers, or single tensors. Norms of parts are whole on every rank,
    however parameters are sharded (one more all-reduce, of one number per tensor), and each parameter counts once.

    **The threshold** may change with progress (``schedule``, a pure function of what was committed before the step),
    and it may follow the norms themselves: by z-score (``adaptive``: see :class:`~.z_clip.NormStatistics`) or relative
    to the running norm of each tensor (``ada_gc``: see :class:`~.ada_gc.RunningNorms`). With ``max_norm`` as well, the
    lower one holds; a fixed cap does not enter the statistics, and there is none unless it is asked for: one below the
    usual norm would clip every step and hide what the statistics say. Steps that ``GradSpikeSkip``, ``ScriptedSkip`` or
    a rung of ``Recovery`` skips, and norms of exactly 0, enter no statistics.

    **Not finite**: a norm that is not finite has no clipped value. That step changes nothing, whichever part it is in
    (weights, moments and step count stay bit-identical); no part is scaled, none enters its statistics, and the step is
    counted in ``Progress.skipped``. With an optimizer that is not fused each step waits for the device once to know.

    **16-bit mixed precision**: norms are divided by the loss scale, which an overflow halves and clipping does not.

    What is saved: the count behind ``clip_frac``, and the statistics by the names of the parts, which are the same
    however a run is sharded. A part without saved ones begins to warm up.

    Logged: ``stability/clip_frac`` (fraction of the parts, over the steps since the last logging step, that were
    clipped), ``stability/clip_level`` (the norm above which this step would have been clipped, the lowest of all parts;
    while statistics warm up without a cap infinite under ``adaptive``, under ``ada_gc`` that of the global norm),
    ``stability/grad_norm`` (global, L2, by ``GradNorm``, before clipping).

    Attributes:
        ceiling: Largest norm that a rewind of :class:`~.recovery.Recovery` asks for, whatever else holds; or ``None``.
        overriding: What another callback (``LROverride``) sets for the largest norm in the step that opens at given
            counters, ``None`` where it sets nothing; it stands above ``max_norm`` and ``schedule``.
        passes_over: Whether a callback that acts later (:class:`~.recovery.Recovery`) skips a step, counted from 1.

    Args:
        max_norm: Largest norm, > 0. BloombergGPT v2: 0.3; OPT and BLOOM: 1.0. ``None``: 1.0, or no cap where
            ``adaptive``, ``ada_gc`` or a ``schedule`` from 0 stands. (Over a recipe that sets a number, say ``null``.)
        norm_type: ``l2``, or ``inf``: the largest absolute value of any gradient element.
        scope: What has a norm of its own: ``global``; ``group``: each group of the optimizer; ``layer``: each block,
            told by the first number in parameter names (``blocks.3``); ``tensor``; or a list of shell patterns for
            module names, each module that one matches (the outermost) being a part and all others one together.
            ``None``: ``tensor`` with ``ada_gc``, else ``global``.
        schedule: Stages ``{from: progress, max_norm: value}``, each until the next begins; ``max_norm`` holds before
            the first. OPT-175B: 2.5, then 1.5, then 1.0.
        unit: Of ``from``: optimizer ``steps``, ``samples`` or ``tokens``.
        adaptive: Options ``z_threshold`` (2.5), ``decay`` (0.97) and ``warmup_steps`` (25) of ``ZClip``; a mapping of
            some of these is as good. ``None``: off.
        ada_gc: Options ``rel_threshold`` (1.05), ``decay`` (0.98), ``warmup_steps`` (100) and ``warmup_max_norm`` (1.0)
            of ``AdaGC``, likewise; ``{}`` for all of these. ``None``: off.
        action: ``act``, or ``log``: the same metrics, and neither gradients nor steps are touched.

    Raises:
        MisconfigurationException: when an argument is out of range, when the schedule is malformed, when a pattern
            matches nothing, when the Trainer or the LightningModule clips as well, under manual optimization, or for
            layers and tensors under an FSDP1 whose flat parameters mix them.

    Example::

        >>> Trainer(callbacks=[GradClip(max_norm=1.0)], logger=False)  # doctest: +SKIP
        >>> GradClip(max_norm=2.5, schedule=[{"from": 4000, "max_norm": 1.5}])  # doctest: +SKIP
        >>> GradClip(adaptive=ZClip())  # doctest: +SKIP
        >>> GradClip(ada_gc=AdaGC())  # each tensor by its own history  # doctest: +SKIP
    """

    order: ClassVar[int] = 40

    def __init__(
        self,
        max_norm: float | None = None,
        norm_type: NormType = "l2",
        scope: Scope | None = None,
        schedule: list[ClipStage] | None = None,
        unit: Literal["steps", "samples", "tokens"] = "steps",
        adaptive: ZClip | None = None,
        ada_gc: AdaGC | None = None,
        action: Literal["act", "log"] = "act",
    ) -> None:
        if scope is None:
            scope = "global" if ada_gc is None else "tensor"
        refuse_broken(max_norm, scope, adaptive, ada_gc)
        if max_norm is None and schedule is None and adaptive is None and ada_gc is None:
            max_norm = 1.0
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scope = scope
        self.stages = [] if schedule is None else check_stages(schedule, max_norm)
        self.unit = unit
        self.action = action
        self.ceiling: float | None = None
        self.overriding: Callable[[Mark], float | None] | None = None
        self.passes_over: Callable[[int], bool] | None = None
        self.adaptive, self.ada_gc = adaptive, ada_gc
        self._kind = "z_clip" if adaptive is not None else "ada_gc"
        self._statistics: PartStatistics | None = None
        if adaptive is not None:
            self._statistics = NormStatistics(adaptive)
        elif ada_gc is not None:
            self._statistics = RunningNorms(ada_gc)
        self._parts: ClipParts | None = None
        self._clipped: float | Tensor = 0.0
        self._seen = 0
        self._level: Tensor | None = None
        self._hooks: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_other_clipping(trainer, pl_module)
            refuse_flat_parameters(trainer, self.scope)
            GradNorm.of(trainer)
            Progress.of(trainer)  # here, so that a resume restores its count of skipped steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.scope != "global":
            for optimizer in trainer.optimizers:  # one, under automatic optimization
                self._parts = ClipParts(optimizer, self.scope, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.action == "act":
            self._hooks = [hook_steps(trainer, optimizer) for optimizer in trainer.optimizers]
        if self._statistics is not None:
            self._statistics.begin(["all"] if self._parts is None else self._parts.names, pl_module.device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._hooks:
            clear_all(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        norms, total = self._norms(GradNorm.of(trainer), optimizer)
        finite = torch.isfinite(total)
        limits, levels = self._judge(trainer, norms, total, finite)
        # Dividing by exactly 1.0 leaves every bit in place; a non-finite norm must not become a divisor.
        divisors = torch.where(finite & (norms > limits), norms / limits, 1.0)
        if self.action == "act":
            skip_step(trainer, optimizer, ~finite)
            if self._parts is None:
                divide_gradients(trainer, optimizer, divisors[0])
            else:
                self._parts.divide(divisors)
        self._level = levels.min()
        self._clipped = self._clipped + (divisors > 1.0).sum()
        self._seen += len(norms)
        if is_logging_step(trainer):
            pl_module.log("stability/clip_frac", self._clipped / self._seen)
            pl_module.log("stability/clip_level", self._level)
            self._clipped, self._seen = 0.0, 0

    def _norms(self, shared: GradNorm, optimizer: Any) -> tuple[Tensor, Tensor]:
        """(parts,) norms, and the norm of all together."""
        total = shared.value if self.norm_type == "l2" else None
        if self._parts is None:
            total = shared.measure(optimizer, self.norm_type) if total is None else total
            return total.reshape(1), total
        norms = self._parts.norms(shared.measure_each(optimizer, self.norm_type), self.norm_type)
        return norms, norms.max() if total is None else total

    def cap(self, mark: Mark) -> float | None:
        """The largest norm, whatever the statistics say, in the step that opens at these counters; None: no cap."""
        asked = None if self.overriding is None else self.overriding(mark)
        return self.own_cap(mark) if asked is None else asked

    def own_cap(self, mark: Mark) -> float | None:
        """The same by ``max_norm`` and ``schedule`` alone."""
        return norm_at(self.stages, getattr(mark, self.unit)) if self.stages else self.max_norm

    def _judge(self, trainer: Trainer, norms: Tensor, total: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """(parts,) largest values that the norms may keep, and levels above which they would be clipped."""
        cap = self.cap(Progress.of(trainer).start)
        limits = levels = torch.full_like(norms, math.inf)
        if self.ceiling is not None:
            cap = self.ceiling if cap is None else min(cap, self.ceiling)
        if self._statistics is not None:
            is_passed = self.passes_over is not None and self.passes_over(Progress.of(trainer).steps)
            accepted = torch.zeros_like(finite) if is_passed else finite
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, (GradSpikeSkip, ScriptedSkip)):
                    accepted = accepted & ~callback.skipped.to(accepted.device)
            limits, levels = self._statistics.judge(norms, total, accepted)
        return (limits, levels) if cap is None else (limits.clamp(max=cap), levels.clamp(max=cap))

    def in_force(self) -> dict[str, Tensor]:
        """What the step now under way was judged by, on the device, for who records it."""
        return {} if self._level is None else {"clip_level": self._level}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._parts = self._level = None
        clear_all(trainer)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"clipped": float(self._clipped), "seen": self._seen}
        if self._statistics is not None:
            state[self._kind] = self._statistics.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clipped, self._seen = float(state_dict["clipped"]), int(state_dict["seen"])
        if self._statistics is not None and self._kind in state_dict:
            self._statistics.load_state_dict(state_dict[self._kind])
