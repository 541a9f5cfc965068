"""The stores of a run, opened and checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lit_stable.data.sources import Source, check_stores, has_validation, open_store, open_stores
from lit_stable.data.store import TokenStore
from lit_stable.data.text.documents import parse_date


@dataclass
class OpenedData:
    """Stores by the name of their source and of their validation set."""

    training: dict[str, TokenStore] = field(default_factory=dict)
    validation: dict[str, TokenStore] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, TokenStore]:
        """All of them, by their key in a recipe."""
        named = {f"data.sources.{name}": store for name, store in self.training.items()}
        return named | {f"data.validation.{name}": store for name, store in self.validation.items()}

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return max(store.vocab_size for store in self.named.values())

    @property
    def eot_id(self) -> int:
        """The end-of-text token behind each document."""
        return next(iter(self.named.values())).eot_id

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer that made the stores."""
        path: Path = next(iter(self.named.values())).tokenizer_path
        return path

    def model_problems(self, vocab_size: int) -> list[str]:
        """What keeps a model with so many embedding rows from reading the stores, if they are open."""
        if not self.training or vocab_size >= self.vocab_size:
            return []
        return [f"model.gpt.vocab_size={vocab_size}: must be at least {self.vocab_size}, the vocabulary of the data."]

    def identities(self) -> dict[str, str]:
        """All that the stores hold, documents, vocabulary and tokenizer too, as a CRC-32 of their indexes, by name."""
        return {name: store.index_crc32 for name, store in self.named.items()}

    def fingerprint(self) -> dict[str, str]:
        """What the stores hold, by name: a resume on other data must not pass unseen."""
        return {name: f"{store.num_tokens} tokens ({store.identity})" for name, store in self.named.items()}


def open_data(
    sources: Mapping[str, Source],
    validation: Mapping[str, str] | None,
    validation_from: str | int | None,
    tokenizer: str,
    sequence_length: int,
    by_date: bool,
) -> OpenedData:
    """Open the stores of all sources and validation sets.

    Args:
        sources: Training data by name.
        validation: Paths of the validation sets; None: the validation split of each source that has one.
        validation_from: Date from which on documents of the sources are validation sets of their own.
        tokenizer: Of built-in sources.
        sequence_length: Tokens per sample.
        by_date: Whether the training data must stand in the order of their dates.

    Raises:
        ValueError: with every problem of the stores.
    """
    problems: list[str] = []
    date = None if validation_from is None else parse_date(validation_from)
    earlier = sources if date is None else _filtered(sources, f"date < {date}")
    training = open_stores(earlier, "train", tokenizer, "data.sources", problems)
    if validation is None:
        validation = {name: sources[name].path for name in training if has_validation(sources[name].path, tokenizer)}
    sets = {name: Source(path) for name, path in validation.items()}
    opened = open_stores(sets, "validation", tokenizer, "data.validation", problems)
    if date is not None:
        opened |= _open_later(sources, date, tokenizer, problems)
    data = OpenedData(training, opened)
    check_stores(data.named, sequence_length, problems)
    if by_date:
        problems += [
            f"data.order.by=date: documents of {name} {problem}; prepare it with --order date."
            for name, store in training.items()
            if (problem := date_problem(store))
        ]
    if problems:
        raise ValueError("\n".join(problems))
    return data


def length_problems(sequence_length: int, max_length: int) -> list[str]:
    """What keeps a model of that context length from reading so long sequences."""
    if max_length >= sequence_length:
        return []
    return [f"data.sequence_length={sequence_length}: must be at most model.gpt.max_length={max_length}."]


def date_problem(store: TokenStore) -> str | None:
    """Why the documents of a store are not in the order of their dates, or None."""
    dates = store.documents["date"]
    if not dates[-1]:
        return "have no dates"
    if np.any(dates[1:] < dates[:-1]):
        return "are not in the order of their dates"
    return None


def _open_later(sources: Mapping[str, Source], date: int, tokenizer: str, problems: list[str]) -> dict[str, TokenStore]:
    """The documents from a date on as validation sets, of the sources that have some."""
    if problems:
        problems.append(f"data.validation_from={date}: adds `date < {date}` to the filter of every source.")
    later: dict[str, TokenStore] = {}
    for name, source in _filtered(sources, f"date >= {date}").items():
        with suppress(ValueError):  # what else keeps it from being opened was said of the training data
            later[f"{name}_from_{date}"] = open_store(source, "train", tokenizer)
    if not later and not problems:
        problems.append(f"data.validation_from={date}: no document is dated so late; give an earlier date.")
    return later


def _filtered(sources: Mapping[str, Source], more: str) -> dict[str, Source]:
    """The sources with one more condition beside their own."""
    return {
        name: replace(source, filter=more if source.filter is None else f"{source.filter} and {more}")
        for name, source in sources.items()
    }
