"""What a training step minimises, and its parts over an accumulation window, for the log."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_stable.model.loss import sample_losses, sample_losses_with_z, sums_per_sample


class TrainingLoss:
    """Cross-entropy per label, plus a z-loss if it has a weight.

    Args:
        z_weight: Weight of the mean of log(Z)^2; 0: nothing of it is computed.

    Raises:
        ValueError: when the weight is negative or not finite.
    """

    def __init__(self, z_weight: float = 0.0) -> None:
        if not 0 <= z_weight < math.inf:
            raise ValueError(f"model.z_loss={z_weight}: must be a finite number >= 0.")
        self.z_weight = z_weight
        self._function: Any = sample_losses_with_z if z_weight else sample_losses
        self._parts: dict[str, list[Tensor]] = {}
        self._counts: list[Tensor] = []

    def compile(self, dynamic: bool | None) -> None:
        """Put the loss into a compiled region of its own: the fp32 copy of the logits is never written to memory."""
        self._function = torch.compile(self._function, dynamic=dynamic)

    def __call__(self, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a micro-batch is minimised by; its parts join the window.

        Args:
            output: Logits (B, T, V), any floating dtype; or, without a z-loss, cross-entropies (B, T).
            labels: (B, T).

        Returns:
            The loss, 0-d fp32; and of each sample the sum of cross-entropies, detached, and the number of labels, (B,).
        """
        per_sample: Any = sums_per_sample if output.ndim == 2 else self._function
        sums, counts, *squares = per_sample(output, labels)
        self._counts.append(counts.sum().detach())
        count = self._counts[-1].clamp(min=1)  # the loss is 0 where every label is masked
        loss: Tensor = sums.sum() / count
        self._note("loss", loss)
        if squares:
            z_loss = self.z_weight * (squares[0].sum() / count)
            self._note("z_loss", z_loss)
            loss = loss + z_loss
        return loss, sums.detach(), counts

    def _note(self, name: str, part: Tensor) -> None:
        self._parts.setdefault(name, []).append(part.detach())

    def clear(self) -> None:
        """Begin a new window."""
        self._parts, self._counts = {}, []

    def window(self, reduce: Callable[[Tensor], Tensor] | None, over_labels: bool = False) -> dict[str, Tensor]:
        """Close the window: mean of each part, ``loss`` being the cross-entropy alone.

        Args:
            reduce: Mean over ranks, a collective; ``None``: nothing is computed or returned.
            over_labels: Whether every label weighs the same, or every micro-batch.
        """
        parts, counts = self._parts, self._counts
        self.clear()
        if reduce is None or not parts:
            return {}
        if not over_labels:
            return {name: reduce(torch.stack(values).mean()) for name, values in parts.items()}
        weights = torch.stack(counts).float()  # (micro-batches,)
        total = reduce(weights.sum()).clamp(min=torch.finfo(torch.float32).tiny)
        return {name: reduce((torch.stack(values) * weights).sum()) / total for name, values in parts.items()}
