"""How far each head's queries and keys are scaled down, and which rows of which layers that is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

Rows = list[tuple[nn.Module, Tensor]]  # a layer, and the factor of each of its output rows


@runtime_checkable
class ScalesQueriesKeys(Protocol):
    """An attention module that says which rows of its projections belong to which head.

    Needed only where it has no ``q_proj`` and ``k_proj`` (``nn.Linear``, rows head by head) as Llama's have.
    """

    key_heads: int
    """G: heads of keys; each serves H / G heads of queries, one after the other."""

    def rows_of_heads(self, q: Tensor, k: Tensor) -> Rows:
        """Factors of query heads (H,) and key heads (G,) as factors of whole layers' rows, (rows,) each."""


def head_factors(largest: Tensor, threshold: float) -> Tensor:
    """What each head's logits are multiplied by, (H,): ``threshold / largest`` where that is below 1, else exactly 1.

    A largest logit that is not finite says nothing about a factor: 1.
    """
    above = (largest > threshold) & largest.isfinite()
    return torch.where(above, threshold / largest, 1.0)


def split_factors(factors: Tensor, key_heads: int) -> tuple[Tensor, Tensor]:
    """Share the factors of the logits (H,) between queries (H,) and keys (G,): their products are the factors, exactly.

    With a key head to each query head both take the root. Where several query heads share one (GQA), it takes the root
    of the smallest factor among them, and each of them the rest: above 1 for a head that needed less, so that the
    logits of a head below the threshold stay where they were.
    """
    of_group = factors.reshape(key_heads, -1)  # (G, H / G)
    k = of_group.amin(1).sqrt()
    return (of_group / k[:, None]).flatten(), k


def rows_to_scale(module: nn.Module, q_heads: int) -> tuple[int, ScalesQueriesKeys] | None:
    """Heads of keys, and what turns factors of heads into factors of rows; ``None``: the module is of no known kind."""
    if isinstance(module, ScalesQueriesKeys):
        return module.key_heads, module
    q, k = (getattr(module, name, None) for name in ("q_proj", "k_proj"))
    if not (isinstance(q, nn.Linear) and isinstance(k, nn.Linear)):
        return None
    size = q.out_features // q_heads
    return k.out_features // size, _TwoProjections(q, k, size)


class _TwoProjections:
    """Rows head by head in two layers."""

    def __init__(self, q: nn.Linear, k: nn.Linear, size: int) -> None:
        self.q, self.k, self.size = q, k, size
        self.key_heads = k.out_features // size

    def rows_of_heads(self, q: Tensor, k: Tensor) -> Rows:
        return [(self.q, q.repeat_interleave(self.size)), (self.k, k.repeat_interleave(self.size))]


@torch.no_grad()
def scale_rows(layer: nn.Module, factors: Tensor) -> None:
    """Multiply a layer's weight and bias, row by row, in place; where they are sharded each rank its own piece."""
    for name, parameter in layer.named_parameters(recurse=False):
        own = factors.to(parameter.dtype).reshape(-1, *[1] * (parameter.ndim - 1))
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            own = DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)
        elif parameter.shape[0] != len(factors):
            raise ValueError(f"{name} of {type(layer).__name__}: has {parameter.shape[0]} rows and not {len(factors)}.")
        parameter.mul_(own)


def normalises(module: nn.Module) -> bool:
    """Whether queries or keys are normalised behind their projections, which undoes any scaling of these."""
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")]
    return any(isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) for norm in norms)
