"""The size of the logits that a language model puts out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .activation_monitor import first_tensor
from .base import MisconfigurationException
from .forward_replay import ForwardReplay
from .monitor import Monitor
from .rank_gather import gather_ranks
from .scalars import Scalars
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_ELEMENTS = 1 << 26  # of logits at a time: 256 MiB in fp32


class OutputMonitor(Monitor):
    """Log log Z, the logarithm of the softmax's denominator over the vocabulary, of a micro-batch.

    The loss does not change when all logits of a token shift together, so nothing keeps them small: log Z drifts, down
    or up, until bf16 logits lose their digits (Chowdhery et al. 2022, arXiv:2204.02311, section 5, whose z-loss is its
    square; Wortsman et al. 2023, arXiv:2309.14322, section 3.3). Seen in the pass of ``ForwardReplay`` (last
    micro-batch, no dropout), which this installs; computed in fp32. One collective per measurement.

    Logged: ``stability/log_z`` (mean over tokens and ranks), ``stability/log_z_rms`` (root of the mean square, so the
    root of what a z-loss sees), ``stability/output_logit_max`` (largest absolute logit).

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        head: Shell pattern for the name of the module that puts out the logits (..., V), whole or as a DTensor.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when not exactly one module's name matches.

    Example::

        >>> Trainer(callbacks=[OutputMonitor(every_steps=100)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, head: str = "*head") -> None:
        super().__init__(every_steps)
        self.head = head
        self._head: nn.Module | None = None
        self._sums: Tensor | None = None  # (4,) fp64: tokens, sum of log Z, of its square, largest logit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            ForwardReplay.of(trainer).watch(self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        named = {unwrapped(name): module for name, module in pl_module.named_modules() if name}
        found = [name for name in named if fnmatchcase(name, self.head)]
        if len(found) != 1:
            some = ", ".join(found or [*named][-4:])
            raise MisconfigurationException(
                f"`OutputMonitor(head={self.head!r})`: matches {len(found)} modules, and must match the one that puts"
                f" out the logits; {'they are' if found else 'among others there are'} {some}."
            )
        self._head = named[found[0]]

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """A hook on the head."""
        assert self._head is not None
        self._sums = None
        handle = self._head.register_forward_hook(self._measure)
        try:
            yield
        finally:
            handle.remove()

    def _measure(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = first_tensor(output)
        assert logits is not None
        whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        sums = log_z_sums(whole)
        self._sums = sums if self._sums is None else _combine(torch.stack([self._sums, sums]))

    def seen(self, trainer: Trainer) -> None:
        """Combine the ranks and pass on."""
        if self._sums is None:
            return
        tokens, total, squares, largest = _combine(gather_ranks(self._sums)).unbind()
        names = ["stability/log_z", "stability/log_z_rms", "stability/output_logit_max"]
        Scalars.of(trainer).add(names, torch.stack([total / tokens, (squares / tokens).sqrt(), largest]))
        self._sums = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._head = self._sums = None


def log_z_sums(logits: Tensor) -> Tensor:
    """(..., V), any floating dtype -> (4,) fp64: number of rows, sum of their log Z, of its square, largest |logit|."""
    rows = logits.flatten(0, -2)
    chunks = torch.split(rows, max(1, _ELEMENTS // rows.shape[-1]))
    log_z = torch.cat([chunk.float().logsumexp(-1) for chunk in chunks]).double()
    largest = torch.linalg.vector_norm(rows, torch.inf, dtype=torch.float32).double()
    return torch.stack([largest.new_full((), log_z.numel()), log_z.sum(), log_z.square().sum(), largest])


def _combine(parts: Tensor) -> Tensor:
    return torch.cat([parts[:, :3].sum(0), parts[:, 3:].amax(0)])
