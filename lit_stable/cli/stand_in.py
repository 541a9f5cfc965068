"""A mixture whose sources are not on this machine, on a corpus that is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_stable.data.corpus import BUILTIN_PREFIX


def stood_in(recipe: Mapping[str, Any], stand_in: str) -> tuple[dict[str, Any], list[str]]:
    """The data of a recipe with ``stand_in`` for the path of every source, where one of them is not on disk.

    Names, weights and all else stay. It is all or none, because sources that are mixed share one tokenizer.

    Returns:
        A layer to lay over the recipe, and a line ``key: from -> to`` for each path; both empty where all are there.
    """
    data = recipe.get("data")
    sources, validation = (data.get(name) if isinstance(data, dict) else None for name in ("sources", "validation"))
    if not isinstance(sources, dict) or not all(isinstance(one, dict) and "path" in one for one in sources.values()):
        return {}, []  # the parser says what is wrong with it
    paths = {f"data.sources.{name}.path": str(source["path"]) for name, source in sources.items()}
    if isinstance(validation, dict):
        paths |= {f"data.validation.{name}": str(path) for name, path in validation.items()}
    missing = {key for key, path in paths.items() if not path.startswith(BUILTIN_PREFIX) and not Path(path).exists()}
    if not missing:
        return {}, []
    layer: dict[str, Any] = {"sources": {name: {**source, "path": stand_in} for name, source in sources.items()}}
    if isinstance(validation, dict):
        layer["validation"] = dict.fromkeys(validation, stand_in)
    notes = [f"{key}: {path} -> {stand_in}{' (not on disk)' * (key in missing)}" for key, path in paths.items()]
    return {"data": layer}, notes
