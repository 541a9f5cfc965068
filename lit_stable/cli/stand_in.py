"""A mixture whose sources are not on this machine, on a corpus that is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_stable.data.corpus import BUILTIN_PREFIX


def stood_in(recipe: Mapping[str, Any], stand_in: str) -> tuple[dict[str, Any], list[str]]:
    """The data of a recipe with ``stand_in`` for the path of every source, where one of them is not on disk.

    Names, weights and all else stay. It is all or none, because sources that are mixed share one tokenizer. A built-in
    corpus knows neither dates nor scores: an order by date becomes the stored one, filters and a split by date go.

    Returns:
        A layer to lay over the recipe, and a line ``key: from -> to`` for each change; both empty where all are there.
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
    if stand_in.startswith(BUILTIN_PREFIX):
        notes += _without_dates_and_scores(recipe["data"], layer)
    return {"data": layer}, notes


def _without_dates_and_scores(data: Mapping[str, Any], layer: dict[str, Any]) -> list[str]:
    """Take off what needs dates or scores; returns the lines."""
    notes = []
    for name, source in layer["sources"].items():
        if source.get("filter") is not None:
            notes.append(f"data.sources.{name}.filter: {source['filter']} -> None")
            source["filter"] = None
    order = data.get("order")
    if isinstance(order, dict) and order.get("by") == "date":
        layer["order"] = {"by": "stored"}
        notes.append("data.order.by: date -> stored")
    if data.get("validation_from") is not None:
        layer["validation_from"] = None
        notes.append(f"data.validation_from: {data['validation_from']} -> None")
    return notes
