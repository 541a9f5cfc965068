"""From the parts of all pieces to the token stores of both splits: what is chosen, where it goes, in which order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_stable.data.columns import CODE, MISSING_CODE, NUMBER, Column, ColumnBuilder
from lit_stable.data.conditions import DocumentFilter, Mask, SettledFilter, Values
from lit_stable.data.store_writer import TokenStoreWriter
from lit_stable.data.text.parts import Part
from lit_stable.data.text.readers import describe

BATCH_TOKENS = 4_000_000  # copied at once
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Choice:
    """Which documents are written, and to which split.

    Args:
        validation_fraction: Share of documents, chosen by a hash of their text, that goes to validation.
        validation_from: Date, yyyymmdd, from which on documents go to validation instead; 0: by the fraction.
        condition: Documents that it does not choose are dropped.
        reject: Whether documents flagged as artefacts are dropped.
        sort_by_date: Whether documents are written by date, oldest first, those without one before all.
    """

    validation_fraction: float = 0.0
    validation_from: int = 0
    condition: DocumentFilter | None = None
    reject: bool = False
    sort_by_date: bool = False

    @property
    def splits(self) -> list[str]:
        """The splits that are written."""
        return [TRAIN, VALIDATION] if self.validation_fraction or self.validation_from else [TRAIN]

    def in_validation(self, part: Part) -> Mask:
        """Which documents of a part go to validation. Equal texts never end up on both sides of a fraction."""
        if self.validation_from:
            return np.asarray(part.dates >= self.validation_from)
        # 64 bits of the digest below fraction * 2^64, in integers, so that no rounding decides.
        hashes = np.ascontiguousarray(part.digests[:, :8]).view(">u8")[:, 0]
        return np.asarray(hashes < np.uint64(math.ceil(self.validation_fraction * 2**64)))


@dataclass
class Counts:
    """Documents by source: all, those written, those rejected as artefacts; and how many written ones have no date."""

    total: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    artefacts: Counter[str] = field(default_factory=Counter)
    num_undated: int = 0


class Assembly:
    """The parts of all pieces, in the order of the input.

    Args:
        tables: Their files.
        keep: The kept keys.
        choice: What is written.

    Raises:
        ValueError: when a kept key has no value anywhere or values of two kinds, or the condition cannot be judged.
    """

    def __init__(self, tables: Sequence[Path], keep: Sequence[str], choice: Choice) -> None:
        self.keep = list(keep)
        self.choice = choice
        self.counts = Counts()
        self._tables = list(tables)
        self.is_text = self._kinds()
        self._filter = self._settled()

    def parts(self) -> Iterator[Part]:
        """Each part, one at a time in memory."""
        return (Part(path, self.keep) for path in self._tables)

    def write(self, folder: Path, **fields: Any) -> dict[str, TokenStoreWriter]:
        """Write the stores of all splits into ``folder``; returns the closed writers by split.

        Args:
            folder: Where ``train`` and ``validation`` go.
            fields: As ``TokenStoreWriter`` takes them.
        """
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(
                    TokenStoreWriter(folder / split, split=split, columns=self.is_text, **fields)
                )
                for split in self.choice.splits
            }
            for rows, chosen in self._rows():
                for split, writer in writers.items():
                    rows.write(writer, np.flatnonzero(chosen[split]), self.choice.sort_by_date)
            self._require_documents(writers)
        return writers

    def _rows(self) -> Iterator[tuple[_Rows, Mapping[str, Mask]]]:
        """Documents with those chosen for each split: part by part, or all of them, since they will be sorted."""
        if not self.choice.sort_by_date:
            for part in self.parts():
                yield _Rows([part], self.is_text), self._chosen(part)
            return
        parts = list(self.parts())
        chosen = [self._chosen(part) for part in parts]
        yield _Rows(parts, self.is_text), {s: np.concatenate([c[s] for c in chosen]) for s in self.choice.splits}

    def _chosen(self, part: Part) -> dict[str, Mask]:
        chosen = np.ones(part.num_documents, dtype=bool)
        if self._filter is not None:
            chosen = self._filter.mask(self._values(part), part.num_documents)
        if self.choice.reject:
            self.counts.artefacts += _by_source(part, chosen & part.flagged)
            chosen &= ~part.flagged
        self.counts.kept += _by_source(part, chosen)
        self.counts.total += _by_source(part, np.ones_like(chosen))
        self.counts.num_undated += int((part.dates[chosen] == 0).sum())
        validation = self.choice.in_validation(part)
        return {TRAIN: chosen & ~validation, VALIDATION: chosen & validation}

    def _kinds(self) -> dict[str, bool]:
        """For each kept key whether its values are texts."""
        kinds: dict[str, set[bool]] = {key: set() for key in self.keep}
        num_documents = 0
        for part in self.parts():
            num_documents += part.num_documents
            for key, column in part.kept.items():
                kinds[key] |= set() if column is None else {column.texts is not None}
        problems = [f"keep={key}: no document has it." for key in self.keep if num_documents and not kinds[key]]
        mixed = [key for key in self.keep if len(kinds[key]) > 1]
        problems += [f"keep={key}: is a number in some documents and a text in others." for key in mixed]
        if problems:
            raise ValueError("\n".join(problems))
        return {key: kinds[key] == {True} for key in self.keep}

    def _settled(self) -> SettledFilter | None:
        if self.choice.condition is None:
            return None
        known = ["date", "source", *self.keep]
        if unknown := [key for key in self.choice.condition.keys if key not in known]:
            raise ValueError(f"filter={self.choice.condition.text}: {', '.join(unknown)} is not kept; add it to keep.")
        return self.choice.condition.settle(lambda: (self._values(part) for part in self.parts()))

    def _values(self, part: Part) -> Values:
        def values(key: str) -> Column:
            if key == "source":
                return part.sources
            if key == "date":
                return Column(np.where(part.dates == 0, np.nan, part.dates))
            column = part.kept[key]
            return _missing(part.num_documents, self.is_text[key]) if column is None else column

        return values

    def _require_documents(self, writers: Mapping[str, TokenStoreWriter]) -> None:
        total = sum(writer.num_documents for writer in writers.values())
        if total == 0:
            raise ValueError(f"input: has no text in it, so there is nothing to write; {self._why_nothing()}.")
        empty = [split for split, writer in writers.items() if writer.num_documents == 0]
        if empty and self.choice.validation_from:
            raise ValueError(
                f"validation_from={self.choice.validation_from}: leaves the {empty[0]} split of {total} documents"
                f" empty; {self.counts.num_undated} have no date. Take another date, or a validation_fraction."
            )
        if empty:
            raise ValueError(
                f"validation_fraction={self.choice.validation_fraction}: leaves the {empty[0]} split of {total} "
                "documents empty; give more documents, a separator that cuts text files into documents, or another "
                "fraction (0: no validation)."
            )

    def _why_nothing(self) -> str:
        summaries = [part.summary for part in self.parts()]
        bad = [row for summary in summaries for row in summary.bad]
        if bad:
            count = sum(summary.num_bad for summary in summaries)
            return f"{count:,} could not be read, the first {describe(bad[0].place)}: {bad[0].problem}"
        return "check the paths" if self.choice.condition is None else "check the paths and the filter"


class _Rows:
    """The documents of some parts as one table, and their tokens where they lie."""

    def __init__(self, parts: Sequence[Part], is_text: Mapping[str, bool]) -> None:
        self._tokens = [part.tokens() for part in parts]
        self._part = np.repeat(np.arange(len(parts)), [part.num_documents for part in parts])
        self._lengths = np.concatenate([part.lengths for part in parts])
        self._starts = np.concatenate([np.cumsum(part.lengths) - part.lengths for part in parts])
        self._dates = np.concatenate([part.dates for part in parts])
        self._sources = _joined("source", [part.sources for part in parts])
        self._kept = {
            key: _joined(key, [_missing(p.num_documents, text) if (c := p.kept[key]) is None else c for p in parts])
            for key, text in is_text.items()
        }

    def write(self, writer: TokenStoreWriter, rows: npt.NDArray[Any], sort: bool) -> None:
        """Hand ``rows`` to a writer, in their order or sorted by date, oldest first, equal dates as they stand."""
        if sort:
            rows = rows[np.argsort(self._dates[rows], kind="stable")]
        cuts = np.flatnonzero(np.diff(np.cumsum(self._lengths[rows]) // BATCH_TOKENS)) + 1
        for batch in np.split(rows, cuts) if rows.size else ():
            tokens = np.concatenate([self._tokens_of(row) for row in batch.tolist()])
            kept = {key: column.take(batch) for key, column in self._kept.items()}
            writer.add_many(tokens, self._lengths[batch], self._sources.take(batch), self._dates[batch], kept)

    def _tokens_of(self, row: int) -> npt.NDArray[Any]:
        start = self._starts[row]
        tokens: npt.NDArray[Any] = self._tokens[self._part[row]][start : start + self._lengths[row]]
        return tokens


def _by_source(part: Part, mask: Mask) -> Counter[str]:
    assert part.sources.texts is not None
    counts = np.bincount(part.sources.data[mask], minlength=len(part.sources.texts)).tolist()
    return Counter({name: count for name, count in zip(part.sources.texts, counts, strict=True) if count})


def _joined(key: str, columns: Sequence[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    builder = ColumnBuilder(key)
    data = np.concatenate([builder.add(column) for column in columns])
    return Column(data, None if builder.texts is None else list(builder.texts))


def _missing(count: int, is_text: bool) -> Column:
    return Column(np.full(count, MISSING_CODE, CODE), []) if is_text else Column(np.full(count, np.nan, NUMBER))
