"""Sums over whole parameters from the pieces that ranks hold, every element counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .parameter_places import component_of, layer_of
from .shards import OverShards, fsdp1_model, local, summed_piece
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class ParameterSums:
    """Per-parameter sums that are the same on every rank, under any strategy.

    Right for plain tensors, FSDP1's pieces, DTensors of any placement, strided shards among them, and mixes: every
    element counts once. One collective for each group of ranks that something is split over, so one under FSDP1 and
    ``fsdp2``, and none on one device and under DDP.

    Args:
        parameters: By name; the same names in the same order on every rank.
        model: The model that FSDP1 wraps, if it does.

    Attributes:
        names: Of the parameters.
        sizes: (n,) fp64: elements of each, over all ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], model: nn.Module | None = None) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._over_shards = OverShards(self.parameters, model) if self.parameters else None
        # Of a piece of FSDP1 nobody but the other ranks knows how much is missing.
        sizes = [float(local(p).numel()) for p in self.parameters]
        (self.sizes,) = self.total(torch.tensor(sizes, dtype=torch.float64, device=self.device))

    @classmethod
    def of(cls, trainer: Trainer, parameters: Mapping[str, nn.Parameter]) -> ParameterSums:
        """For parameters of the trainer's model, whatever strategy wraps it. A collective: all ranks call it."""
        return cls(parameters, fsdp1_model(trainer))

    def squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """(n,) fp64: the sum of squares of this rank's piece of each tensor; ``None`` counts as zero."""
        pieces = [summed_piece(t) for t in tensors if t is not None]
        norms = iter(torch._foreach_norm(pieces, 2.0, torch.float32) if pieces else ())
        return self.stack([None if t is None else next(norms) for t in tensors]).square()

    def stack(self, values: Sequence[Tensor | None]) -> Tensor:
        """(n,) fp64 of one 0-d number per parameter; ``None`` counts as zero."""
        zero = torch.zeros((), device=self.device)
        parts = [zero if value is None else value.to(self.device) for value in values]
        # By way of fp32, as a zero among them would have it, and together: one kernel, not one for each.
        return torch.stack(parts).to(torch.float32).double() if parts else zero.new_zeros(0, dtype=torch.float64)

    def total(self, *local: Tensor) -> tuple[Tensor, ...]:
        """Sums over all ranks of any number of (n,) fp64 tensors, all in one go."""
        stacked = torch.stack(local, 1)
        return (stacked if self._over_shards is None else self._over_shards.sum(stacked)).unbind(1)


class Grouping:
    """Sums per layer, per component, and in all, of what was summed per parameter.

    Attributes:
        labels: One per group, as a suffix of a metric's name: ``_layer/NAME``, ``_component/NAME``, ``_tensor/NAME``,
            and the empty one for the whole.
    """

    def __init__(self, sums: ParameterSums, per_tensor: bool) -> None:
        names = sums.names
        kinds = [[f"_layer/{layer_of(n)}" for n in names], [f"_component/{component_of(n)}" for n in names]]
        kinds += [[f"_tensor/{n}" for n in names]] if per_tensor else []
        kinds += [["" for _ in names]]
        members: dict[str, list[int]] = {}
        for kind in kinds:
            for index, label in enumerate(kind):
                members.setdefault(label, []).append(index)
        self.labels = list(members)
        # One row per group, filled up with the index of a zero: a sum of gathered rows is the same on every rank to the
        # last bit, which one with atomic additions is not, and a NaN stays in the groups that it belongs to.
        widest = max((len(m) for m in members.values()), default=0)
        rows = [m + [len(names)] * (widest - len(m)) for m in members.values()]
        self._members = torch.tensor(rows, dtype=torch.long, device=sums.device).reshape(len(rows), widest)
        self.sizes = self.add_up(sums.sizes)

    def add_up(self, values: Tensor) -> Tensor:
        """(n,) per parameter -> (len(labels),) per group."""
        padded = torch.cat([values, values.new_zeros(1)])
        return padded[self._members].sum(1)


def named_trainable(module: LightningModule, trainer: Trainer) -> dict[str, nn.Parameter]:
    """The parameters that optimizers hold, by unwrapped name; asked in ``on_fit_start``, before any evaluation."""
    optimized = {p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
    return {unwrapped(name): p for name, p in module.named_parameters() if p in optimized}
