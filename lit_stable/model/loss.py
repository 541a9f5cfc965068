"""Next-token cross-entropy, in fp32 whatever the dtype of the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a position that is not predicted."""


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each sample the sum of the cross-entropies in nats, and the number of labels it is over.

    Sharding wrappers install no autocast, so the cast to fp32 is made here. Sums and counts stay apart because the mean
    of a step is over all micro-batches and ranks, which may hold different numbers of labels; samples because they may
    be of different sources.

    Args:
        logits: (B, T, V), any floating dtype.
        labels: (B, T), -100 where nothing is predicted.

    Returns:
        Sums (B,), fp32, zero where nothing is predicted, and counts (B,), int64.
    """
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(labels).sum(1), (labels != IGNORED).sum(1)


def sample_losses_with_z(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sample_losses`, and the sums of log(Z)^2 over the same positions, (B,), Z being the softmax's denominator.

    Added with a small weight it keeps logits from drifting away together, which cross-entropy alone does not see
    (PaLM, arXiv:2204.02311, section 5; z-loss). Its gradient is 2 log(Z) softmax(logits) per position.
    """
    sums, counts = sample_losses(logits, labels)
    log_z = torch.logsumexp(logits.float(), -1)  # (B, T)
    return sums, counts, (log_z.square() * (labels != IGNORED)).sum(1)
