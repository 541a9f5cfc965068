"""Parameter groups for weight decay, by what a parameter is.

Decay pulls a parameter towards 0, which is right for a matrix and wrong for a norm gain, whose neutral value is 1:
after n steps without gradient a decayed gain is (1 - lr * weight_decay)^n. Names of parameters say nothing here; the
type of the module that owns a parameter, and its number of dimensions, do.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from lit_stable.model.norm import NORM_TYPES

# Strongest first: a weight shared by an embedding and a Linear (a tied head) is an embedding.
_ROLES = ("norms", "embeddings", "weights", "biases")
# Wrappers put these into parameter names: torch.compile, activation checkpointing, FSDP1.
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class AuditRow(NamedTuple):
    """One group as a reader wants it; ``parameters`` counts elements over all shards."""

    group: str
    tensors: int
    parameters: int
    weight_decay: float | None  # None: frozen, in no group
    examples: list[str]


def parameter_groups(module: nn.Module, weight_decay: float, decay_embeddings: bool = True) -> list[dict[str, Any]]:
    """Split the trainable parameters of ``module`` into groups for an optimizer.

    - ``weights``: Linear weights, and what is left with 2 or more dimensions; decayed.
    - ``embeddings``: weights of ``nn.Embedding``, a tied head included; decayed if ``decay_embeddings``.
    - ``norms``: every parameter of a norm layer; never decayed.
    - ``biases``: Linear biases, and what is left with fewer than 2 dimensions; never decayed.

    Each parameter is in exactly one group, a shared one once; one with ``requires_grad=False`` is in none, and an empty
    group is left out. The split also holds what FSDP2 needs: norms that stay unsharded are plain tensors and never
    share a group, and so a multi-tensor kernel, with sharded ones.

    Args:
        weight_decay: Decay of the decayed groups, >= 0.

    Returns:
        Dicts with ``name``, ``params`` and ``weight_decay``, in the order of the list above.

    Raises:
        ValueError: when ``weight_decay`` is negative.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay}: must be 0 or more.")
    decay = {"weights": weight_decay, "embeddings": weight_decay if decay_embeddings else 0.0}
    members: dict[str, list[nn.Parameter]] = {"weights": [], "embeddings": [], "norms": [], "biases": []}
    roles = _roles(module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            members[roles[parameter]].append(parameter)
    return [
        {"name": name, "params": params, "weight_decay": decay.get(name, 0.0)}
        for name, params in members.items()
        if params
    ]


def audit_rows(groups: list[dict[str, Any]], module: nn.Module) -> list[AuditRow]:
    """Describe each group, and the frozen parameters if there are any.

    Args:
        groups: what ``parameter_groups`` returned, or the ``param_groups`` of an optimizer made from it.

    Raises:
        ValueError: when a trainable parameter of ``module`` is not in exactly one group.
    """
    names = {parameter: _unwrapped(name) for name, parameter in module.named_parameters()}
    memberships = Counter(parameter for group in groups for parameter in group["params"])
    counts = {name: memberships[parameter] for parameter, name in names.items() if parameter.requires_grad}
    if misplaced := {name: count for name, count in counts.items() if count != 1}:
        listed = ", ".join(f"{name} in {count}" for name, count in misplaced.items())
        raise ValueError(f"parameter groups: {listed} groups; every trainable parameter must be in exactly one.")
    rows = [_row(group["name"], group["params"], group["weight_decay"], names) for group in groups]
    frozen = [parameter for parameter in names if not parameter.requires_grad]
    return rows + ([_row("frozen", frozen, None, names)] if frozen else [])


def audit(groups: list[dict[str, Any]], module: nn.Module) -> str:
    """The rows of ``audit_rows`` as a table, for the first lines of a run."""
    table = [("group", "tensors", "parameters", "weight decay", "for example")]
    for row in audit_rows(groups, module):
        decay = "in no group" if row.weight_decay is None else f"{row.weight_decay:g}"
        table.append((row.group, f"{row.tensors:,}", f"{row.parameters:,}", decay, ", ".join(row.examples)))
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    lines = []
    for group, *numbers, examples in table:
        cells = [group.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=False)), examples]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _roles(module: nn.Module) -> dict[nn.Parameter, str]:
    """Role of every parameter; a parameter that several modules own takes the strongest."""
    roles: dict[nn.Parameter, str] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            role = _role(owner, name, parameter)
            roles[parameter] = min(role, roles.get(parameter, role), key=_ROLES.index)
    return roles


def _role(owner: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if isinstance(owner, NORM_TYPES):
        return "norms"
    if isinstance(owner, nn.Embedding):
        return "embeddings"
    if isinstance(owner, nn.Linear):  # by attribute: FSDP1 leaves a 1-dimensional piece of the matrix here
        return "weights" if name == "weight" else "biases"
    return "weights" if parameter.ndim >= 2 else "biases"


def _row(group: str, params: list[nn.Parameter], decay: float | None, names: dict[nn.Parameter, str]) -> AuditRow:
    examples = [names[parameter] for parameter in params[:2]]
    return AuditRow(group, len(params), sum(parameter.numel() for parameter in params), decay, examples)


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name
