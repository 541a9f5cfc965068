"""Which parameters a pattern means: by the names of modules, and by whether a module is a norm."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torch.nn.utils import parametrize

from .base import MisconfigurationException
from .wrapper_names import unwrapped

Norms = Literal["only", "except", "with"]

_NORM_ENDINGS = ("LayerNorm", "RMSNorm")


def is_norm(module: nn.Module, extra: tuple[type, ...] = ()) -> bool:
    """Whether a module is a norm layer, by its type: names of attributes (``ln_1``, ``norm``) say nothing reliable.

    A type counts when its name or that of a base ends in ``LayerNorm`` or ``RMSNorm`` (torch's own, and the many that
    projects write themselves), or when it is one of ``extra``. A module that scales and normalises nothing is none, as
    the scales of heads and cosines in lit-stable's GPT, which are otherwise kept as norms are.
    """
    return isinstance(module, extra) or any(t.__name__.endswith(_NORM_ENDINGS) for t in type(module).__mro__)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """A module's parameters without those of its submodules, but with the originals of its parametrized ones.

    A parametrization, such as ``torch.nn.utils.parametrizations.weight_norm``, moves the original weight of an
    embedding into a submodule.
    """
    inside = getattr(module, "parametrizations", None) if parametrize.is_parametrized(module) else None
    return [*module.parameters(recurse=False), *(inside.parameters() if inside is not None else ())]


def import_types(paths: Sequence[str]) -> tuple[type, ...]:
    """Classes by their import paths, ``package.module.Class``.

    Raises:
        MisconfigurationException: when one cannot be imported or is no class.
    """
    found: list[type] = []
    for path in paths:
        package, _, name = path.rpartition(".")
        try:
            value = getattr(importlib.import_module(package), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise MisconfigurationException(
                f"`norm_types={path!r}`: cannot be imported ({error}); give the full path, package.module.Class."
            ) from error
        if not isinstance(value, type):
            raise MisconfigurationException(f"`norm_types={path!r}`: is no class but a {type(value).__name__}.")
        found.append(value)
    return tuple(found)


def norm_parameter_names(module: nn.Module, extra: tuple[type, ...] = ()) -> set[str]:
    """Unwrapped names of the parameters that norm layers own."""
    owned = {p for m in module.modules() if is_norm(m, extra) for p in m.parameters(recurse=False)}
    return {unwrapped(name) for name, parameter in module.named_parameters() if parameter in owned}


def select(module: nn.Module, patterns: Sequence[str], norms: Norms, extra: tuple[type, ...] = ()) -> set[str]:
    """Unwrapped names of the parameters in all modules that match, and in the modules inside those.

    Args:
        module: Names count from here.
        patterns: Shell patterns for module names; ``*`` also spans dots, so ``blocks.1*`` means 1, 10, 11, ...
        norms: ``only``: parameters of norm layers alone; ``except``: all others; ``with``: both.
        extra: Further types that are norms.

    Returns:
        A shared parameter is selected when any of its owners is, and stands under the first of its names.

    Raises:
        MisconfigurationException: when a pattern selects nothing; names that are near are listed.
    """
    modules = [(unwrapped(name), m) for name, m in module.named_modules(remove_duplicate=False)]
    selected: set[nn.Parameter] = set()
    for pattern in patterns:
        matching = [(name, m) for name, m in modules if any(fnmatchcase(n, pattern) for n in with_ancestors(name))]
        owners = [m for _, m in matching if norms == "with" or is_norm(m, extra) == (norms == "only")]
        parameters = {p for m in owners for p in m.parameters(recurse=False)}
        if not parameters:
            raise MisconfigurationException(_nothing_found(pattern, norms, modules, [m for _, m in matching], extra))
        selected |= parameters
    return {unwrapped(name) for name, parameter in module.named_parameters() if parameter in selected}


def with_ancestors(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _nothing_found(
    pattern: str,
    norms: Norms,
    modules: list[tuple[str, nn.Module]],
    matching: list[nn.Module],
    extra: tuple[type, ...],
) -> str:
    if not matching:
        names = sorted({name for name, _ in modules if name})
        near = difflib.get_close_matches(pattern.strip("*."), names, n=4, cutoff=0.3) or names[:4]
        return f"pattern {pattern!r}: matches no module; names near it are {', '.join(near)}."
    types = sorted({type(m).__name__ for m in matching if next(m.parameters(recurse=False), None) is not None})
    if norms != "only":
        outside = "" if norms == "with" else " outside norms"
        return f"pattern {pattern!r}: the modules that it matches own no parameters{outside}."
    near = [name for name, m in modules if is_norm(m, extra)][:4]
    elsewhere = f"norms elsewhere are {', '.join(near)}" if near else "name the classes that are norms in norm_types"
    return (
        f"pattern {pattern!r}: no norm (LayerNorm, RMSNorm) is in what it matches, which are {', '.join(types)};"
        f" {elsewhere}."
    )
