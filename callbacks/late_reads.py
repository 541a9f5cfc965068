"""Numbers of a step that the host reads one batch later, when the device has more to do already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from .base import StabilityCallback, find_or_install
from .event_ring import EventRing

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Reader = Callable[[list[float]], None]


class LateReads(StabilityCallback):
    """Hand numbers of the device to whoever prints or logs them, without an idle device in between.

    Who reads a number of a step that has just been queued waits until the device has nothing left to do, and the
    device then waits for the host. Here a row is copied behind the step, and read at the end of the next micro-batch:
    then the host has queued that one too. What a reader's clock says is when the device was done with the row, while
    the host is ahead of it. Rows are read in the order in which they were given, at the same batch in every run, and
    at once before a validation, a checkpoint, the end of an epoch or the fit, and an error. On a CPU nothing is in
    flight, and rows are read as they are given.

    It installs itself. Nothing is logged or saved.

    Example::

        >>> LateReads.of(trainer).read(loss.reshape(1), print)  # in `on_train_batch_end`  # doctest: +SKIP
    """

    order: ClassVar[int] = 2  # before all that give rows at the end of a batch

    def __init__(self) -> None:
        self._ring = EventRing(lag=1)
        self._readers: dict[tuple[int, ...], Reader] = {}
        self._batch = self._given = 0

    @staticmethod
    def of(trainer: Trainer) -> LateReads:
        """The trainer's instance, installed if it has none yet."""
        return find_or_install(trainer, LateReads)

    def read(self, row: Tensor, reader: Reader) -> None:
        """Call ``reader`` with the numbers of ``row``, (n,) on any device, a micro-batch from now."""
        self._given += 1
        key = (self._batch, self._given)
        self._readers[key] = reader
        self._ring.push(key, row.detach())
        self._hand_out(self._ring.take(self._batch))

    def flush(self) -> None:
        """Read all that was given. Waits for the device."""
        self._hand_out(self._ring.flush())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._batch += 1
        self._hand_out(self._ring.take(self._batch))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush()

    def handle_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.flush()

    def state_dict(self) -> dict[str, Any]:
        self.flush()  # before other callbacks are asked for what they have read
        return {}

    def _hand_out(self, rows: list[tuple[tuple[int, ...], list[float]]]) -> None:
        for key, numbers in rows:
            self._readers.pop(key)(numbers)
