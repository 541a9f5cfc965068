"""Optimizer steps that Lightning knows nothing of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class RawSteps:
    """Notices, under manual optimization, a batch whose optimizers stepped behind Lightning's back.

    ``self.optimizers()`` wraps them; stepped without the wrap they leave ``global_step`` where it is and call no hook,
    so every callback that acts on steps would stand by in silence.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._steps = 0  # in this batch, by the optimizers' own hooks
        self._counted = 0  # by Lightning, before this batch

    def watch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen to the optimizers; nothing to do under automatic optimization."""
        self.release()
        if pl_module.automatic_optimization:
            return
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                self._handles.append(optimizer.register_step_post_hook(self._count))

    def _count(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1

    def begin_batch(self, trainer: Trainer) -> None:
        """Forget the batch before."""
        self._steps, self._counted = 0, trainer.global_step

    def refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise when optimizers stepped in this batch and Lightning counted none of it."""
        if self._steps and trainer.global_step == self._counted:
            raise MisconfigurationException(
                f"`{type(pl_module).__name__}.training_step`: steps its optimizer without Lightning, which counts no"
                " step and calls no callback then; step what `self.optimizers()` returns, without use_pl_optimizer."
            )

    def release(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
