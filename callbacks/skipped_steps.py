"""How many optimizer steps changed nothing, and whether the last one did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .gradient_scaler import FOUND_INF, has_scaler
from .private_optimizer_names import after_step_first

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class SkippedSteps:
    """Counts on the device where steps are judged there, so that no step waits for it.

    Who skips a step says so by :meth:`note`. What a gradient scaler leaves out it finds out by itself: a looped
    optimizer is then not stepped at all, a fused one is with ``found_inf``.

    Attributes:
        count: Steps so far, as it is known: an int or a 0-d tensor.
    """

    def __init__(self) -> None:
        self.count: int | Tensor = 0
        self._before: int | Tensor = 0  # the count before the last step
        self._handles: list[Any] = []
        self._open = False  # whether a step is under way that a scaler takes
        self._left_out: Tensor | bool = False  # that step, by the scaler

    # -- counting ----------------------------------------------------------------------------------------------------

    def set(self, count: int, last: bool = False) -> None:
        """Begin from a checkpoint's count, of which the last step is one or not."""
        self.count, self._before, self._open = count, count - last, False

    def begin_step(self) -> None:
        """What is noted from here on is of one step."""
        self._before, self._open, self._left_out = self.count, bool(self._handles), True

    def note(self, flag: Tensor | bool) -> None:
        """Add one step if ``flag`` (a 0-d tensor is summed on its device, without a host sync)."""
        if isinstance(flag, Tensor):
            earlier = self.count if isinstance(self.count, Tensor) else 0 * flag.long() + self.count
            self.count = earlier.to(flag.device) + flag.long()
        elif flag:
            self.count = self.total() + 1

    def total(self) -> int:
        """The count on the host, for which a device is waited for."""
        self.count = int(self.count)
        return self.count

    def last(self) -> bool:
        """Whether the last step changed nothing; waits likewise."""
        self._before = int(self._before)
        return self.total() > self._before

    def on(self, device: torch.device) -> Tensor:
        """The count as a 0-d tensor on a device, without a wait if that is where steps are judged."""
        return _on(self.count, device)

    def last_on(self, device: torch.device) -> Tensor:
        """Whether the last step changed nothing, likewise."""
        return _on(self.count, device) > _on(self._before, device)

    # -- what a scaler leaves out ------------------------------------------------------------------------------------

    def watch(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin to listen to the optimizer, where Lightning steps one with a gradient scaler."""
        self.release()
        if has_scaler(trainer) and module.automatic_optimization:
            optimizers = [o for o in trainer.optimizers if hasattr(o, "register_step_post_hook")]
            self._handles = [after_step_first(optimizer, self._look) for optimizer in optimizers]

    def _look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, FOUND_INF, None)
        self._left_out = False if found_inf is None else found_inf.reshape(()) > 0

    def end_step(self) -> None:
        """Count the step that has been taken if a scaler left it out and nobody has noted it."""
        if not self._open:
            return
        self._open = False
        if isinstance(flag := self._left_out, Tensor):
            self.note(flag & (_on(self.count, flag.device) == _on(self._before, flag.device)))
        elif flag and not self.last():
            self.note(True)

    def release(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._open = [], False


def _on(count: int | Tensor, device: torch.device) -> Tensor:
    return count.to(device) if isinstance(count, Tensor) else torch.full((), count, device=device)
