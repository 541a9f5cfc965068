"""Next-token cross-entropy, in fp32 whatever the dtype of the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a position that is not predicted."""


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies in nats and the number of labels it is over.

    Sharding wrappers install no autocast, so the cast to fp32 is made here. Sum and count stay apart because the mean
    of a step is over all micro-batches and ranks, which may hold different numbers of labels.

    Args:
        logits: (B, T, V), any floating dtype.
        labels: (B, T), -100 where nothing is predicted.

    Returns:
        Two scalars: sum (fp32, zero when nothing is predicted) and count (int64).
    """
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `next_token_loss`, per sample: sums (B,) in fp32 and counts (B,), for losses per source."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(labels).sum(1), (labels != IGNORED).sum(1)


def next_token_loss_with_z(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`next_token_loss`, and the sum of log(Z)^2 over the same positions, Z being the softmax's denominator.

    Added with a small weight it keeps logits from drifting away together, which cross-entropy alone does not see
    (PaLM, arXiv:2204.02311, section 5; z-loss). Its gradient is 2 log(Z) softmax(logits) per position.

    Returns:
        Three scalars: cross-entropy sum, count, and sum of squares (fp32).
    """
    total, count = next_token_loss(logits, labels)
    log_z = torch.logsumexp(logits.float(), -1)  # (B, T)
    return total, count, (log_z.square() * (labels != IGNORED)).sum()
