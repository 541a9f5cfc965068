"""What the tokens of a batch look like, so that an artefact in the data is seen before the model has learned it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .base import MisconfigurationException, refuse_all
from .monitor import Monitor
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; products wrap around


class TokenStatistics(Monitor):
    """Log how varied the tokens of a global batch are.

    A loss that falls too well may be learning an artefact: OPT-175B's team found runs of escape characters by reading
    what their model wrote, and a public crawl holds samples of nothing but backslashes. Those show here as they are
    read: entropy falls, one token takes a large share, n-grams repeat.

    All micro-batches and ranks of a measured step count. One sum over all ranks per measurement, of one number per
    token of the vocabulary.

    Logged: ``stability/token_entropy`` (nats, of the distribution of tokens in the batch);
    ``stability/token_top_share`` (share of the most frequent token, 0 to 1) and ``stability/token_top_id`` (which one);
    ``stability/repeated_ngrams`` (share of n-grams that stood earlier in the same sequence, 0 to 1) and
    ``stability/repeated_ngrams_worst`` (the largest such share of any sequence).

    Token ids are ``input_ids`` of a mapping, else the first integer tensor (B, T) of the batch; a LightningModule that
    knows better defines ``token_ids(batch) -> Tensor``.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        vocab_size: Number of token ids; ``None``: ``config.vocab_size`` of the LightningModule or of one in it. Larger
            ids count as the last.
        ngram: Length of an n-gram in tokens, >= 1.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when a size is below 1 or the vocabulary's is not to be found;
            when a batch holds no token ids.

    Example::

        >>> Trainer(callbacks=[TokenStatistics(vocab_size=50304)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, vocab_size: int | None = None, ngram: int = 4) -> None:
        super().__init__(every_steps)
        refuse_all(
            f"`TokenStatistics({name}={value})`: must be at least 1."
            for name, value in (("vocab_size", vocab_size), ("ngram", ngram))
            if value is not None and value < 1
        )
        self.vocab_size = vocab_size
        self.ngram = ngram
        self._size = 0
        self._sums: Tensor | None = None  # (V + 2,) fp64: occurrences; repeated n-grams; n-grams
        self._worst: Tensor | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = self.vocab_size or vocabulary_size(pl_module)
        if found is None:
            raise MisconfigurationException(
                f"`TokenStatistics`: {type(pl_module).__name__} has no config.vocab_size; give vocab_size=..."
            )
        self._size = found

    def drop_window(self) -> None:
        self._sums = self._worst = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.is_due(trainer):
            self._sums = self._worst = None
            return
        ids = token_ids(batch, pl_module)  # (B, T)
        share = repeated_ngrams(ids, self.ngram)  # (B,)
        total = max(ids.shape[1] - self.ngram + 1, 0)
        counts = torch.zeros(self._size + 2, dtype=torch.float64, device=ids.device)
        counts[: self._size] = occurrences(ids, self._size)
        counts[-2] = share.sum() * total
        counts[-1:].fill_(total * ids.shape[0])  # an assignment would wait for the device
        self._sums = counts if self._sums is None else self._sums + counts
        self._worst = share.max() if self._worst is None else torch.maximum(self._worst, share.max())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._sums is None or self._worst is None:
            return
        worst = torch.zeros(trainer.world_size, dtype=torch.float64, device=self._sums.device)
        worst[trainer.global_rank] = self._worst  # each rank in its own place, so that one sum serves all
        both = torch.cat([self._sums, worst])
        if trainer.world_size > 1:
            dist.all_reduce(both)
        counts, repeated, total = both[: self._size], both[self._size], both[self._size + 1]
        shares = counts / counts.sum()
        entropy = -torch.special.xlogy(shares, shares).sum()
        top_share, top = shares.max(0)
        names = ["token_entropy", "token_top_share", "token_top_id", "repeated_ngrams", "repeated_ngrams_worst"]
        values = [entropy, top_share, top.double(), repeated / total.clamp_min(1), both[self._size + 2 :].max()]
        Scalars.of(trainer).add([f"stability/{name}" for name in names], torch.stack(values))
        self._sums = self._worst = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._sums = self._worst = None


def repeated_ngrams(ids: Tensor, n: int) -> Tensor:
    """(B, T) token ids -> (B,) fp64: share of a sequence's n-grams that stood in it before; 0 where T < n.

    N-grams are compared by a 64-bit hash.

    Example::

        >>> repeated_ngrams(torch.tensor([[1, 2, 3, 4], [7, 7, 7, 7]]), 2)
        tensor([0.0000, 0.6667], dtype=torch.float64)
    """
    total = ids.shape[1] - n + 1
    if total < 1:
        return torch.zeros(ids.shape[0], dtype=torch.float64, device=ids.device)
    digits = ids.long()
    hashes = digits[:, :total]
    for offset in range(1, n):
        hashes = torch.add(digits[:, offset : offset + total], hashes, alpha=_MULTIPLIER)
    ordered = hashes.sort(1).values
    return (ordered[:, 1:] == ordered[:, :-1]).sum(1).double() / total


def occurrences(ids: Tensor, size: int) -> Tensor:
    """How often each id occurs, (size,) fp64; `bincount` would wait for the device."""
    flat = ids.flatten().long().clamp(0, size - 1)
    return torch.zeros(size, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat)).double()


def token_ids(batch: Any, module: LightningModule) -> Tensor:
    """The token ids (B, T) of a batch.

    Raises:
        MisconfigurationException: when there are none.
    """
    own = getattr(module, "token_ids", None)
    found = own(batch) if own is not None else _integers(batch)
    if found is None:
        raise MisconfigurationException(
            f"batch of type {type(batch).__name__}: holds no integer tensor (B, T) to take as token ids; define"
            " `token_ids(batch) -> Tensor` on the LightningModule."
        )
    return found


def _integers(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.ndim == 2 and not batch.is_floating_point() else None
    if isinstance(batch, Mapping):
        if isinstance(batch.get("input_ids"), Tensor):
            ids: Tensor = batch["input_ids"]
            return ids
        batch = list(batch.values())
    parts = batch if isinstance(batch, (list, tuple)) else ()
    return next((t for t in map(_integers, parts) if t is not None), None)


def vocabulary_size(module: nn.Module) -> int | None:
    """``config.vocab_size`` of the module or of the first in it that has one."""
    sizes = (getattr(getattr(m, "config", None), "vocab_size", None) for m in module.modules())
    return next((size for size in sizes if isinstance(size, int)), None)
