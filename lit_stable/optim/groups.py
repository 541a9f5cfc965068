"""Parameter groups for weight decay, by what a parameter is.

Decay pulls a parameter towards 0, which is right for a matrix and wrong for a norm gain, whose neutral value is 1:
after n steps without gradient a decayed gain is (1 - lr * weight_decay)^n. Names of parameters say nothing here; the
type of the module that owns a parameter, and its number of dimensions, do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from lit_stable.callbacks.wrapper_names import unwrapped
from lit_stable.model.norm import NORMS_AND_GAINS
from lit_stable.optim.options import PatternOptions

# Strongest first: a weight shared by an embedding and a Linear (a tied head) is an embedding.
_ROLES = ("norms", "norm_biases", "embeddings", "weights", "biases")
_ORDER = ("weights", "embeddings", "norms", "norm_biases", "biases")


class AuditRow(NamedTuple):
    """One group as a reader wants it; ``parameters`` counts elements over all shards."""

    group: str
    tensors: int
    parameters: int
    weight_decay: float | None  # None: frozen, in no group
    examples: list[str]


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    decay_embeddings: bool = True,
    decay_norms: bool = False,
    patterns: Mapping[str, PatternOptions] | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters of ``module`` into groups for an optimizer.

    - ``weights``: Linear weights, and what is left with 2 or more dimensions; decayed.
    - ``embeddings``: weights of ``nn.Embedding``, a tied head included; decayed if ``decay_embeddings``.
    - ``norms``: every parameter of a norm layer; not decayed. With ``decay_norms`` its gains only, and decayed.
    - ``norm_biases``: with ``decay_norms`` what else a norm layer has; never decayed.
    - ``biases``: Linear biases, and what is left with fewer than 2 dimensions; never decayed.

    What a pattern matches leaves these groups for ones named ``ROLE of PATTERN``, one per role it meets.

    Each parameter is in exactly one group, a shared one once; one with ``requires_grad=False`` is in none, and an empty
    group is left out. The split also holds what FSDP2 needs: norms that stay unsharded are plain tensors and never
    share a group, and so a multi-tensor kernel, with sharded ones.

    Args:
        weight_decay: Decay of the decayed groups, >= 0.
        patterns: Exceptions by shell patterns for names of parameters; the last that matches wins.

    Returns:
        Dicts with ``name``, ``params`` and ``weight_decay``, in the order of the list above; those of a pattern also
        have its ``lr_factor``.

    Raises:
        ValueError: when ``weight_decay`` is negative, or a pattern is left with no trainable parameter.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay}: must be 0 or more.")
    patterns = patterns or {}
    roles = _roles(module, decay_norms)
    members: dict[tuple[str, str | None], list[nn.Parameter]] = {
        (role, pattern): [] for role in _ORDER for pattern in (None, *patterns)
    }
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            matching = [pattern for pattern in patterns if fnmatchcase(unwrapped(name), pattern)]
            members[roles[parameter], matching[-1] if matching else None].append(parameter)
    _refuse_idle(patterns, members, module)
    decay = {
        "weights": weight_decay,
        "embeddings": weight_decay if decay_embeddings else 0.0,
        "norms": weight_decay if decay_norms else 0.0,
    }
    return [
        _group(role, pattern, params, decay.get(role, 0.0), patterns)
        for (role, pattern), params in members.items()
        if params
    ]


def _group(
    role: str,
    pattern: str | None,
    params: list[nn.Parameter],
    decay: float,
    patterns: Mapping[str, PatternOptions],
) -> dict[str, Any]:
    if pattern is None:
        return {"name": role, "params": params, "weight_decay": decay}
    options = patterns[pattern]
    own = decay if options.weight_decay is None else options.weight_decay
    name = f"{role} of {pattern}"
    return {"name": name, "params": params, "weight_decay": own, "lr_factor": options.lr_factor}


def _refuse_idle(
    patterns: Mapping[str, PatternOptions],
    members: Mapping[tuple[str, str | None], list[nn.Parameter]],
    module: nn.Module,
) -> None:
    busy = {pattern for (_, pattern), params in members.items() if params}
    names = sorted({re.sub(r"\.\d+\.", ".*.", unwrapped(name)) for name, _ in module.named_parameters()})
    if idle := [pattern for pattern in patterns if pattern not in busy]:
        raise ValueError(
            "\n".join(
                f"optimizer.patterns.{pattern}: is left with no trainable parameter; the names are {', '.join(names)}."
                for pattern in idle
            )
        )


def audit_rows(groups: list[dict[str, Any]], module: nn.Module) -> list[AuditRow]:
    """Describe each group, and the frozen parameters if there are any.

    Args:
        groups: what ``parameter_groups`` returned, or the ``param_groups`` of an optimizer made from it.

    Raises:
        ValueError: when a trainable parameter of ``module`` is not in exactly one group.
    """
    names = {parameter: unwrapped(name) for name, parameter in module.named_parameters()}
    memberships = Counter(parameter for group in groups for parameter in group["params"])
    counts = {name: memberships[parameter] for parameter, name in names.items() if parameter.requires_grad}
    if misplaced := {name: count for name, count in counts.items() if count != 1}:
        listed = ", ".join(f"{name} in {count}" for name, count in misplaced.items())
        raise ValueError(f"parameter groups: {listed} groups; every trainable parameter must be in exactly one.")
    rows = [_row(_title(group), group["params"], group["weight_decay"], names) for group in groups]
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


def _roles(module: nn.Module, decay_norms: bool) -> dict[nn.Parameter, str]:
    """Role of every parameter; a parameter that several modules own takes the strongest."""
    roles: dict[nn.Parameter, str] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            role = _role(owner, name, parameter, decay_norms)
            roles[parameter] = min(role, roles.get(parameter, role), key=_ROLES.index)
    return roles


def _role(owner: nn.Module, name: str, parameter: nn.Parameter, decay_norms: bool) -> str:
    if isinstance(owner, NORMS_AND_GAINS):
        return "norms" if name == "weight" or not decay_norms else "norm_biases"
    if isinstance(owner, nn.Embedding):
        return "embeddings"
    if isinstance(owner, nn.Linear):  # by attribute: FSDP1 leaves a 1-dimensional piece of the matrix here
        return "weights" if name == "weight" else "biases"
    return "weights" if parameter.ndim >= 2 else "biases"


def _title(group: dict[str, Any]) -> str:
    factor = group.get("lr_factor", 1.0)
    return str(group["name"]) if factor == 1 else f"{group['name']}, lr x {factor:g}"


def _row(group: str, params: list[nn.Parameter], decay: float | None, names: dict[nn.Parameter, str]) -> AuditRow:
    examples = [names[parameter] for parameter in params[:2]]
    return AuditRow(group, len(params), sum(parameter.numel() for parameter in params), decay, examples)
