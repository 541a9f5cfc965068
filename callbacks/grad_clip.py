"""Clip the global gradient norm, on the device, under any strategy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from .base import MisconfigurationException, StabilityCallback, is_logging_step
from .clip_schedule import ClipStage, check_stages, norm_at
from .device_step import clear, clear_after_each_step, divide_gradients, skip_step
from .grad_norm import GradNorm, NormType
from .progress import Progress
from .z_clip import NormStatistics, ZClip

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GradClip(StabilityCallback):
    """Scale all gradients down together so that their global norm is at most ``max_norm``.

    The factor is ``min(1, max_norm / norm)`` exactly (no epsilon), so an unclipped step is bit-identical to one
    without the callback. With a fused optimizer the division happens inside its kernel and nothing waits for the
    device. Use it instead of ``Trainer(gradient_clip_val=...)``, which Lightning refuses under FSDP and which a skip
    decision could not see. Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.

    The threshold may change with progress (``schedule``, a pure function of what was committed before the step), and
    it may follow the norm itself (``adaptive``: see :class:`~.z_clip.NormStatistics`). With both, the lower one holds;
    a fixed cap does not enter the statistics, and with ``adaptive`` there is none unless it is asked for: one below
    the usual norm would clip every step and hide what the statistics say.

    A norm that is not finite has no clipped value: that step changes nothing (weights, moments and step count stay
    bit-identical), is counted in ``Progress.skipped`` and enters no statistics.

    What is saved: the count behind ``clip_frac``, and the statistics of ``adaptive``; a checkpoint that has none
    loads, and they begin to warm up.

    Logged: ``stability/clip_frac`` (fraction of the steps since the last logging step that were clipped),
    ``stability/clip_level`` (the norm above which this step would have been clipped; infinite while ``adaptive`` warms
    up without a cap), ``stability/grad_norm`` (L2, by ``GradNorm``, before clipping).

    Args:
        max_norm: Largest global norm, > 0. BloombergGPT v2: 0.3; OPT and BLOOM: 1.0. ``None``: 1.0, or no cap where
            ``adaptive`` or a ``schedule`` from 0 stands. (Over a recipe that sets a number, say ``null``.)
        norm_type: ``l2``, or ``inf``: the largest absolute value of any gradient element.
        schedule: Stages ``{from: progress, max_norm: value}``, each until the next begins; ``max_norm`` holds before
            the first. OPT-175B: 2.5, then 1.5, then 1.0.
        unit: Of ``from``: optimizer ``steps``, ``samples`` or ``tokens``.
        adaptive: Options ``z_threshold`` (2.5), ``decay`` (0.97) and ``warmup_steps`` (25) of the adaptive threshold;
            ``None``: off.
        action: ``act``, or ``log``: the same metrics, and neither gradients nor steps are touched.

    Raises:
        MisconfigurationException: when ``max_norm`` is not a positive number, when the schedule is malformed, when the
            Trainer or the LightningModule clips as well, under manual optimization, or under a gradient scaler (16-bit
            mixed precision).

    Example::

        >>> Trainer(callbacks=[GradClip(max_norm=1.0)], logger=False)  # doctest: +SKIP
        >>> GradClip(max_norm=2.5, schedule=[{"from": 4000, "max_norm": 1.5}])  # doctest: +SKIP
        >>> GradClip(adaptive=ZClip())  # doctest: +SKIP
    """

    order: ClassVar[int] = 40

    def __init__(
        self,
        max_norm: float | None = None,
        norm_type: NormType = "l2",
        schedule: list[ClipStage] | None = None,
        unit: Literal["steps", "samples", "tokens"] = "steps",
        adaptive: ZClip | None = None,
        action: Literal["act", "log"] = "act",
    ) -> None:
        if max_norm is not None and not (max_norm > 0 and math.isfinite(max_norm)):
            raise MisconfigurationException(f"`GradClip(max_norm={max_norm})`: must be a finite number > 0.")
        for name, value, allowed in (
            ("norm_type", norm_type, ("l2", "inf")),
            ("unit", unit, ("steps", "samples", "tokens")),
            ("action", action, ("act", "log")),
        ):
            if value not in allowed:
                raise MisconfigurationException(f"`GradClip({name}={value!r})`: must be one of {', '.join(allowed)}.")
        if max_norm is None and schedule is None and adaptive is None:
            max_norm = 1.0
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.stages = [] if schedule is None else check_stages(schedule, max_norm)
        self.unit = unit
        self.action = action
        self._statistics = None if adaptive is None else NormStatistics(adaptive)
        self._clipped: float | Tensor = 0.0
        self._seen = 0
        self._hooks: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_other_clipping(trainer, pl_module)
            GradNorm.of(trainer)
            Progress.of(trainer)  # here, so that a resume restores its count of skipped steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks = [clear_after_each_step(optimizer) for optimizer in trainer.optimizers]
        if self._statistics is not None:
            self._statistics.to(pl_module.device)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        shared = GradNorm.of(trainer)
        norm = shared.value if self.norm_type == "l2" else shared.measure(optimizer, self.norm_type)
        assert norm is not None
        cap = norm_at(self.stages, getattr(Progress.of(trainer).start, self.unit)) if self.stages else self.max_norm
        limit: float | Tensor = math.inf if cap is None else cap
        level = limit
        if self._statistics is not None:
            limit, level = (b if cap is None else b.clamp(max=cap) for b in self._statistics.judge(norm))
        finite = torch.isfinite(norm)
        # Dividing by exactly 1.0 leaves every bit in place; a non-finite norm must not reach the kernel as a divisor.
        divisor = torch.where(finite, (norm / limit).clamp(min=1.0), torch.ones_like(norm))
        if self.action == "act":
            skip_step(trainer, optimizer, ~finite)
            divide_gradients(optimizer, divisor)
        self._clipped = self._clipped + (divisor > 1.0)
        self._seen += 1
        if is_logging_step(trainer):
            pl_module.log("stability/clip_frac", self._clipped / self._seen)
            pl_module.log("stability/clip_level", level)
            self._clipped, self._seen = 0.0, 0

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for optimizer in trainer.optimizers:
            clear(optimizer)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"clipped": float(self._clipped), "seen": self._seen}
        if self._statistics is not None:
            state["statistics"] = self._statistics.values.tolist()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clipped, self._seen = float(state_dict["clipped"]), int(state_dict["seen"])
        if self._statistics is not None and "statistics" in state_dict:
            self._statistics.values = torch.tensor(state_dict["statistics"], dtype=torch.float32)


def refuse_other_clipping(trainer: Trainer, pl_module: LightningModule) -> None:
    """Raise when something else would clip as well, or when a step cannot be acted on here."""
    if trainer.gradient_clip_val:
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})`: gradients would be clipped twice, since"
            " `GradClip` is on as well; delete gradient_clip_val."
        )
    own = getattr(type(pl_module), "configure_gradient_clipping", None)
    if getattr(own, "__module__", "").split(".")[0] not in ("lightning", "pytorch_lightning"):
        raise MisconfigurationException(
            f"`{type(pl_module).__name__}.configure_gradient_clipping` is overridden: gradients would be clipped"
            " twice, since `GradClip` is on as well; delete the method."
        )
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"`{type(pl_module).__name__}.automatic_optimization=False`: `GradClip` acts before Lightning's own"
            " optimizer step; use automatic optimization, or clip in training_step."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})`: its gradient scaler overwrites the clipping factor; use"
            " bf16-mixed."
        )
