"""Next-token cross-entropy, in fp32 whatever the dtype of the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lit_stable.callbacks.ignored_label import IGNORED

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def position_losses(
    logits: torch.Tensor, labels: torch.Tensor, with_z: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of each position the cross-entropy in nats, 0 where the label is -100, and log(Z), Z being the denominator.

    On CUDA one kernel reads the logits, and the backward pass writes their gradient over them: who wants to keep them
    beyond that takes a copy.

    Args:
        logits: (B, T, V), any floating dtype.
        labels: (B, T).
        with_z: Whether log(Z) is wanted.

    Returns:
        Two tensors (B, T), fp32; the second may be ``None`` where it is not wanted. On CUDA a label that is neither
        -100 nor in the vocabulary makes a NaN.
    """
    rows, targets = logits.flatten(0, 1), labels.flatten()
    # Not a `DTensor`, whose pieces the kernel would take for the whole.
    if logits.is_cuda and type(logits) is torch.Tensor and rows.is_contiguous() and logits.dtype in _KERNEL_DTYPES:
        from lit_stable.model.loss_kernel import CrossEntropy

        losses, log_z = CrossEntropy.apply(rows, targets, IGNORED)  # type: ignore[no-untyped-call]
    else:
        losses = F.cross_entropy(rows.float(), targets, ignore_index=IGNORED, reduction="none")
        log_z = torch.logsumexp(rows.float(), -1) if with_z else None
    return losses.view_as(labels), None if log_z is None else log_z.view_as(labels)


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
    return sums_per_sample(position_losses(logits, labels, with_z=False)[0], labels)


def sums_per_sample(losses: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropies and labels, (B, T) each -> sums of the cross-entropies and numbers of labels, (B,) each."""
    return losses.sum(1), (labels != IGNORED).sum(1)


def sample_losses_with_z(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sample_losses`, and the sums of log(Z)^2 over the same positions, (B,), Z being the softmax's denominator.

    Added with a small weight it keeps logits from drifting away together, which cross-entropy alone does not see
    (PaLM, arXiv:2204.02311, section 5; z-loss). Its gradient is 2 log(Z) softmax(logits) per position.
    """
    losses, log_z = position_losses(logits, labels)
    assert log_z is not None
    counted = labels != IGNORED
    return losses.sum(1), counted.sum(1), (log_z.square() * counted).sum(1)
