"""What the recovery ladder changes in a run, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .device_step import hook_steps, is_fused, skip_step
from .dropout_rate import DropoutRate
from .grad_clip import GradClip
from .learning_rate import EffectiveLR
from .optimizer_state import zero_state
from .progress import Mark, Progress
from .recovery_standing import Standing

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_NAME = "Recovery"


class RecoveryOverrides:
    """Learning rate, weight decay, dropout and clipping norm as the ladder wants them; steps that change nothing.

    Attributes:
        cuts: Product of the cuts of the learning rate in the branch that led here; part of a checkpoint.
        skip_until: Last step that changes nothing; part of a checkpoint.
        standing: What rewinds have set, by the ledger; no part of a checkpoint, which is older than they are.
    """

    def __init__(self) -> None:
        self.cuts = 1.0
        self.skip_until = 0
        self.standing = Standing()
        self._dropout: DropoutRate | None = None
        self._hooks: list[Any] = []
        self._reset = False

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied by."""
        return self.cuts * self.standing.lr_factor

    def install(self, trainer: Trainer) -> None:
        """Reach the optimizer's groups; called in ``setup``."""
        effective = EffectiveLR.of(trainer)
        effective.add(_NAME, lambda mark, lr, group: lr * self.lr_factor)
        effective.add_option(_NAME, "weight_decay", self._weight_decay, replaces=True)

    def _weight_decay(self, mark: Mark, own: Any, group: int) -> Any:
        wanted = self.standing.override("weight_decay")
        return own if wanted is None or not own > 0 else wanted

    def begin(self, trainer: Trainer, module: LightningModule, now: Standing, seen: int) -> None:
        """Put in force what the ledger says, over a checkpoint that was written after ``seen`` of its lines."""
        self.standing = now
        self._hooks = [hook_steps(trainer, optimizer) for optimizer in trainer.optimizers if is_fused(optimizer)]
        if (p := now.override("dropout")) is not None:
            self._dropout = DropoutRate(p)
            self._dropout.find(module, "Recovery")
            self._dropout.apply()
        for clip in clips(trainer):
            clip.ceiling, clip.passes_over = now.override("clip"), self.passes_over
        self._reset = any(e.done.get("reset_optimizer") and e.number > seen for e in now.rewinds)

    def before_batch(self, trainer: Trainer) -> None:
        """Reset the optimizer if that is still to be done: not before what was restored is verified."""
        if self._reset:
            self._reset = False
            for optimizer in trainer.optimizers:
                zero_state(optimizer)

    def passes_over(self, step: int) -> bool:
        """Whether a step, counted from 1, changes nothing."""
        return step <= self.skip_until

    def before_step(self, trainer: Trainer, optimizer: Any) -> None:
        """Let the step change nothing if it is to be passed over."""
        if self.passes_over(Progress.of(trainer).steps):
            skip_step(trainer, optimizer, torch.ones((), dtype=torch.bool, device=trainer.strategy.root_device))

    def end(self, trainer: Trainer) -> None:
        """Undo all that was touched."""
        EffectiveLR.of(trainer).remove(_NAME)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._dropout is not None:
            self._dropout.restore()
        self._dropout = None
        for clip in clips(trainer):
            clip.ceiling = clip.passes_over = None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"cuts": self.cuts, "skip_until": self.skip_until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self.cuts, self.skip_until = float(state["cuts"]), int(state["skip_until"])


def clips(trainer: Trainer) -> list[GradClip]:
    """The trainer's callbacks that clip."""
    return [c for c in trainer.callbacks if isinstance(c, GradClip)]  # type: ignore[attr-defined]
