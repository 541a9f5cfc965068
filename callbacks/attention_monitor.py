"""The largest attention logit of every layer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from .attention_watch import AttentionWatch
from .base import rank_zero_warn
from .forward_replay import ForwardReplay
from .monitor import Monitor
from .rank_gather import gather_ranks
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AttentionMonitor(Monitor):
    """Log the largest attention logit of each attention module: over heads, positions, samples and ranks.

    A logit is a query times a key times the factor, as the softmax gets it: after norms of queries and keys and rotary
    phases, with an additive mask, before a soft cap. Where logits grow without bound the softmax collapses on one
    position and gradients vanish or explode (Dehghani et al. 2023, arXiv:2302.05442, section 3.2; Zhai et al. 2023,
    arXiv:2303.06296); the loss shows it late. Fused kernels never show the logits, so products are taken once more, in
    fp32, on measured steps, in the pass of ``ForwardReplay`` (last micro-batch, no dropout), which this installs.

    Queries and keys are those of every call of ``scaled_dot_product_attention``, so models need not be prepared. A
    module that goes another way shows them in a method ``queries_keys``; see ``ShowsQueriesKeys``
    (``attention_logits.py``). ``torch.nn.MultiheadAttention`` does neither. One collective per measurement.

    Logged: ``stability/attention_logit_max/NAME``, NAME being the module that attends, and
    ``stability/attention_logit_max`` alone, the largest of them. Minus infinity: nothing attended to anything.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step. One costs about a third of a micro-batch, shared with ``ActivationMonitor``, and the
            products of queries and keys in fp32.

    Example::

        >>> Trainer(callbacks=[AttentionMonitor(every_steps=100)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None) -> None:
        super().__init__(every_steps)
        self._watch = AttentionWatch()
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            ForwardReplay.of(trainer).watch(self)

    def watching(self, module: LightningModule) -> AbstractContextManager[None]:
        """Note every attention."""
        return self._watch.watching(module)

    def seen(self, trainer: Trainer) -> None:
        """Combine the ranks and pass on."""
        largest_of_heads = self._watch.take()
        if not largest_of_heads:
            if not self._warned:
                rank_zero_warn(
                    "`AttentionMonitor`: no call of scaled_dot_product_attention and no module with queries_keys was"
                    " seen; give the attention module that method."
                )
            self._warned = True
            return
        names = list(largest_of_heads)
        largest = gather_ranks(torch.stack([heads.amax() for heads in largest_of_heads.values()])).amax(0)  # (n,)
        keys = [f"stability/attention_logit_max/{name}" for name in names]
        Scalars.of(trainer).add([*keys, "stability/attention_logit_max"], torch.cat([largest, largest.amax()[None]]))
