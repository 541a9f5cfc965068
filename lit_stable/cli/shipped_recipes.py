"""The recipes that lie in the package, by the names that ``--config`` takes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def shipped_recipes() -> dict[str, Path]:
    """Name, as in ``stability/grad_clip``, and path of every recipe in the package."""
    root = Path(next(iter(import_module("lit_stable.recipes").__path__)))  # a folder without __init__.py
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
