"""Losses and perplexities of named validation sets and their sources, summed in fp64 over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import SumMetric

TOTAL = "val/loss"


class ValidationLosses:
    """Token-weighted mean losses, in nats per token.

    Keys: ``val/loss`` over all sets together; ``val/SET/loss`` and ``val/SET/perplexity`` per set; for sets that mix
    sources also ``val/SET/SOURCE/loss`` and ``val/SET/SOURCE/perplexity``. A loss that is not finite stays so.
    """

    def __init__(self) -> None:
        self._sets: list[tuple[str, list[str]]] = []
        self._sums: dict[tuple[int, int], tuple[SumMetric, SumMetric]] = {}  # (set, source) -> (loss, tokens)

    def start(self, sets: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Begin a pass over the sets, given with the sources each mixes.

        All ranks hold the same sums from here on, whatever batches they see.
        """
        self._sets = [(name, list(sources)) for name, sources in sets.items()]
        self._sums = {
            (s, k): (_sum_metric(device), _sum_metric(device))
            for s, (_, sources) in enumerate(self._sets)
            for k in range(len(sources))
        }

    def update(self, index: int, sums: Tensor, counts: Tensor, sources: Tensor) -> None:
        """Add a batch of set ``index``: ``sums`` and ``counts`` (B,) per sample, ``sources`` (B,) their source."""
        for source in range(len(self._sets[index][1])):
            loss, tokens = self._sums[index, source]
            here = sources == source  # no boolean indexing: its result's shape would wait for the device
            loss.update(torch.where(here, sums, 0).sum())
            tokens.update(torch.where(here, counts, 0).sum())

    def compute(self) -> dict[str, Tensor]:
        """All losses by key; sums over the ranks."""
        totals = {key: (loss.compute(), tokens.compute()) for key, (loss, tokens) in self._sums.items()}
        values: dict[str, Tensor] = {TOTAL: _mean(list(totals.values()))}
        for s, (name, sources) in enumerate(self._sets):
            parts = {source: totals[s, k] for k, source in enumerate(sources) if totals[s, k][1] > 0}
            values.update(_loss_and_perplexity(f"val/{name}", list(parts.values())))
            if len(parts) > 1:
                for source, part in parts.items():
                    values.update(_loss_and_perplexity(f"val/{name}/{source}", [part]))
        return values


def _sum_metric(device: torch.device) -> SumMetric:
    # NaN is kept: a validation that broke must be seen. fp64, since an fp32 sum stops counting tokens at 2^24.
    metric = SumMetric(nan_strategy="disable")
    metric.set_dtype(torch.float64)
    return metric.to(device)


def _mean(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    if not parts:
        return torch.tensor(math.nan)
    return torch.stack([loss for loss, _ in parts]).sum() / torch.stack([tokens for _, tokens in parts]).sum()


def _loss_and_perplexity(prefix: str, parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    loss = _mean(parts)
    return {f"{prefix}/loss": loss, f"{prefix}/perplexity": loss.exp()}
