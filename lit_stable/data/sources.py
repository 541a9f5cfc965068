"""From what a recipe says about a data set to an open token store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.data.conditions import DocumentFilter
from lit_stable.data.corpus import BUILTIN, BUILTIN_PREFIX, builtin_folder
from lit_stable.data.filtered_store import FilteredStore
from lit_stable.data.store import TokenStore


@judges_arguments(ValueError)
@dataclass
class Source:
    """One source of the training mixture.

    Args:
        path: A folder written by ``lit-stable prepare``, a token store, or ``builtin:python-stdlib``.
        weight: Share of this source in samples, relative to the other weights; 0 leaves it out.
        filter: Documents that are read, as ``score >= 0.5`` or ``top 0.3 by score``; null: all.
    """

    path: str
    weight: float = 1.0
    filter: str | None = None


def weight_problems(weights: Mapping[str, float]) -> list[str]:
    """What is wrong with the weights of the sources, by name."""
    if not weights:
        return ["data.sources={}: must name at least one source, as {text: {path: FOLDER}}."]
    problems = [
        f"data.sources.{name}.weight={weight}: must be finite and at least 0."
        for name, weight in weights.items()
        if not (math.isfinite(weight) and weight >= 0)
    ]
    if not any(weights.values()):
        problems.append("data.sources: all weights are 0; give one source a weight above 0.")
    return problems


def store_folder(path: str, split: str, tokenizer: str) -> Path:
    """The token store that ``path`` means: itself, or its ``split`` when it is a prepared folder or built in.

    Raises:
        ValueError: when there is no such built-in corpus.
    """
    if path.startswith(BUILTIN_PREFIX):
        return builtin_folder(path.removeprefix(BUILTIN_PREFIX), tokenizer) / split
    folder = Path(path).expanduser()  # a recipe is read by no shell
    return folder if (folder / "index.json").is_file() else folder / split


def has_validation(path: str, tokenizer: str) -> bool:
    """Whether ``path`` brings a validation split of its own: a bare token store does not."""
    return (
        store_folder(path, "validation", tokenizer) != Path(path).expanduser()
        and (store_folder(path, "validation", tokenizer) / "index.json").is_file()
    )


def open_store(source: Source, split: str, tokenizer: str) -> TokenStore:
    """The store of one source, as far as its filter chooses.

    Raises:
        ValueError: when it cannot be opened, ``NothingChosen`` when its filter leaves nothing.
    """
    folder = store_folder(source.path, split, tokenizer)
    return TokenStore(folder) if source.filter is None else FilteredStore(folder, DocumentFilter(source.filter))


def open_stores(
    sources: Mapping[str, Source], split: str, tokenizer: str, key: str, problems: list[str]
) -> dict[str, TokenStore]:
    """Open the stores of ``sources`` by name; what cannot be opened is told in ``problems`` under ``key``."""
    stores: dict[str, TokenStore] = {}
    for name, source in sources.items():
        try:
            stores[name] = open_store(source, split, tokenizer)
        except ValueError as error:
            problems.append(f"{key}.{name}={source.path}: {error}")
    return stores


def check_stores(stores: Mapping[str, TokenStore], sequence_length: int, problems: list[str]) -> None:
    """Add to ``problems`` each store that is too short for one window or made by another tokenizer than the first."""
    first = next(iter(stores), None)
    for name, store in stores.items():
        if store.num_windows(sequence_length) == 0:
            problems.append(
                f"data.sequence_length={sequence_length}: {name} holds only {store.num_tokens} tokens, a window needs "
                f"one more than its length; shorten the windows or give more text."
            )
        if first is not None and store.tokenizer_sha256 != stores[first].tokenizer_sha256:
            problems.append(
                f"{name}: was tokenised with another tokenizer than {first}; prepare both with one tokenizer file."
            )


def path_problems(training: Mapping[str, str], validation: Mapping[str, str], tokenizer: str) -> list[str]:
    """What is wrong with the paths of sources and validation sets; built-in ones need not be prepared yet."""
    problems: list[str] = []
    for key, split, paths in (("data.sources", "train", training), ("data.validation", "validation", validation)):
        builtin = {name: path for name, path in paths.items() if path.startswith(BUILTIN_PREFIX)}
        for name, path in builtin.items():
            if path.removeprefix(BUILTIN_PREFIX) not in BUILTIN:
                problems.append(f"{key}.{name}={path}: no such corpus; there is {', '.join(BUILTIN)}.")
        given = {name: Source(path) for name, path in paths.items() if name not in builtin}
        open_stores(given, split, tokenizer, key, problems)
    return problems
