"""The parts of a model whose gradients are clipped each by its own norm: groups, layers or single tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .base import MisconfigurationException
from .grad_norm import NormType
from .module_patterns import select, with_ancestors
from .parameter_places import layer_of_module
from .shards import local
from .wrapper_names import unwrapped

#: What has a norm of its own; a list holds shell patterns for the names of modules that are one part each.
Scope = Literal["global", "group", "layer", "tensor"] | list[str]

REST = "rest"  # what no pattern matches, together


class ClipParts:
    """Parameters by the part that they belong to, in the order of an optimizer's groups.

    Names are those of the parameters before any wrapping, so they are the same whether a run is sharded or not: of the
    tensor; of its layer, which is all before the name's first number and that number (``gpt.blocks.3``), or the owning
    module where there is none (``gpt.embedding``); of the outermost module that a pattern matches; ``group 0``, ...

    Args:
        optimizer: Its groups.
        scope: Any but ``global``.
        module: Where the names come from.

    Raises:
        MisconfigurationException: when a pattern matches no module with parameters; names that are near are listed.
    """

    def __init__(self, optimizer: Any, scope: Scope, module: nn.Module) -> None:
        labels = _labels(optimizer, scope, module)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.names = list(dict.fromkeys(labels))
        places: dict[str, list[int]] = {name: [] for name in self.names}
        for place, label in enumerate(labels):
            places[label].append(place)
        self._parameters = [[parameters[i] for i in members] for members in places.values()]
        most = max(map(len, places.values()))
        padded = [[*members, *[len(labels)] * (most - len(members))] for members in places.values()]
        self._places = torch.tensor(padded, device=parameters[0].device)  # (parts, most); the end stands for nothing

    def norms(self, each: Tensor, norm_type: NormType) -> Tensor:
        """(parts,) norms from the (n,) norms of the single gradients; added in one order, so alike on all ranks."""
        members = torch.cat([each, each.new_zeros(1)])[self._places]
        norms: Tensor = torch.linalg.vector_norm(members, math.inf if norm_type == "inf" else 2, dim=1)
        return norms

    def divide(self, divisors: Tensor) -> None:
        """Divide the gradients of each part in place by its own of the (parts,) divisors; 1.0 leaves every bit."""
        with torch.no_grad():
            for divisor, parameters in zip(divisors.unbind(), self._parameters, strict=True):
                if gradients := [local(p.grad) for p in parameters if p.grad is not None]:
                    torch._foreach_div_(gradients, divisor)


def _labels(optimizer: Any, scope: Scope, module: nn.Module) -> list[str]:
    if scope == "group":
        return [f"group {i}" for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    names = {parameter: unwrapped(name) for name, parameter in module.named_parameters()}
    own = [
        names.get(p, f"parameter {i}.{j}")
        for i, g in enumerate(optimizer.param_groups)
        for j, p in enumerate(g["params"])
    ]
    if isinstance(scope, list):
        try:
            select(module, scope, "with")
        except MisconfigurationException as error:
            raise MisconfigurationException(f"`GradClip(scope={scope})`: {error}") from error
        return [_outermost(name, scope) for name in own]
    # Not `layer_of`: tensors of a list (`scales.0`) are numbered too, and no layers.
    return [layer_of_module(name.rpartition(".")[0]) or name for name in own] if scope == "layer" else own


def _outermost(name: str, patterns: Sequence[str]) -> str:
    matching = (m for m in with_ancestors(name) if m != name and any(fnmatchcase(m, p) for p in patterns))
    return next(matching, REST)
