"""The training loss of each source of the data by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import MisconfigurationException
from .monitor import Monitor
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class SourceLoss(Monitor):
    """Log the training loss per source, over all samples of a measured step.

    A source whose loss falls far below the others' may hold an artefact that is easy to learn; one that rises alone is
    worth a look at its documents. The mean hides both.

    What it reads: the LightningModule keeps ``sample_losses`` of the micro-batch that ``training_step`` has just seen:
    the sum of the losses of each sample's tokens, the number of those tokens, and the number of the sample's source,
    each (B,). ``GPTModule`` does. A micro-batch of which ``training_step`` returns None does not count. One sum over
    all ranks per measurement.

    Logged: ``stability/source_loss/NAME`` (nats per token; NaN where the step had none of the source) and
    ``stability/source_share/NAME`` (share of the step's tokens, 0 to 1).

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        names: Of the sources, in the order of their numbers; ``None``: ``source_names`` of the data module.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when there are no names; when ``sample_losses`` is missing.

    Example::

        >>> Trainer(callbacks=[SourceLoss(names=["web", "books"])], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, names: list[str] | None = None) -> None:
        super().__init__(every_steps)
        self.names = names
        self._names: list[str] = []
        self._sums: Tensor | None = None  # (2, sources) fp64: sum of losses, number of tokens
        self._before: Any = None  # what the module kept of an earlier micro-batch
        self._has_loss = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = self.names or getattr(trainer.datamodule, "source_names", None)  # type: ignore[attr-defined]
        if not found:
            raise MisconfigurationException(
                "`SourceLoss`: the data module has no `source_names`; give names=[...], in the order of their numbers."
            )
        self._names, self._sums = list(found), None

    def drop_window(self) -> None:
        self._sums = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.is_due(trainer):
            self._sums = None
        self._before, self._has_loss = getattr(pl_module, "sample_losses", None), False

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._has_loss = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self.is_due(trainer):
            return
        self._take(pl_module)
        if self.has_ended(trainer):
            nothing = torch.zeros(2, len(self._names), dtype=torch.float64, device=pl_module.device)
            sums, self._sums = nothing if self._sums is None else self._sums, None
            if trainer.world_size > 1:
                dist.all_reduce(sums)
            losses, tokens = sums
            scalars = Scalars.of(trainer)
            scalars.add([f"stability/source_loss/{name}" for name in self._names], losses / tokens)
            scalars.add([f"stability/source_share/{name}" for name in self._names], tokens / tokens.sum())

    def _take(self, module: LightningModule) -> None:
        kept = getattr(module, "sample_losses", None)
        # `training_step` returned None; one that steps by itself may go back in a way that Lightning does not see.
        if not self._has_loss and (module.automatic_optimization or kept is self._before):
            return
        if kept is None:
            raise MisconfigurationException(
                f"`SourceLoss`: {type(module).__name__} keeps no `sample_losses`; let training_step set it to (sums of"
                " losses, numbers of tokens, sources), (B,) each."
            )
        *sums, source = kept
        both = torch.stack([part.detach().double() for part in sums])  # (2, B)
        if self._sums is None:
            self._sums = both.new_zeros(2, len(self._names))
        self._sums = self._sums.index_add(1, source, both)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._sums = self._before = None
