"""A token store of which only some documents are read, as if the others had never been written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_stable.data.columns import Column
from lit_stable.data.conditions import DocumentFilter, Mask, Values
from lit_stable.data.store import DocumentPlace, Tokens, TokenStore

BLOCK = 4096  # documents whose places are worked out together
STRETCH = BLOCK * 256  # documents that are judged at once
KEPT_BLOCKS = 8


class NothingChosen(ValueError):
    """A filter that chooses no document of a store."""


class _Block(NamedTuple):
    """The chosen documents of a block: where they begin among the chosen tokens, where in the store, and their rows."""

    places: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]


class FilteredStore(TokenStore):
    """The documents of a store that a filter chooses, in their order, without gaps.

    One pass over the documents' table and the columns of the filter, at the start; then 8 bytes per 4096 documents.
    ``documents`` and ``values`` still tell of all documents, and a document keeps its number.

    Args:
        path: Folder of the store.
        condition: The filter.

    Raises:
        ValueError: as for a store; when the filter speaks of a key that the store does not keep or cannot be judged.
        NothingChosen: when the filter chooses nothing.
    """

    def __init__(self, path: Path | str, condition: DocumentFilter) -> None:
        super().__init__(path)
        self.condition = condition
        self.all_documents, self.all_tokens = self.num_documents, self.num_tokens
        if unknown := [key for key in condition.keys if key not in self.keys]:
            raise ValueError(
                f"filter={condition.text}: {', '.join(unknown)} is not kept in {self.path}, which has"
                f" {', '.join(self.keys)}; prepare it with --keep {','.join(unknown)}."
            )
        self._settled = condition.settle(lambda: (self._values(*ends) for ends in self._stretches()))
        tokens, self.num_documents = self._survey()
        self._sums = np.concatenate([[0], np.cumsum(tokens)])  # chosen tokens before each block
        self.num_tokens = int(self._sums[-1])
        if not self.num_documents:
            raise NothingChosen(f"filter={condition.text}: chooses none of the {self.all_documents} documents.")
        self.identity = f"{self.identity}, {condition.text}"
        self._blocks: dict[int, _Block] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return FilteredStore, (self.path, self.condition)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the chosen documents, in the dtype of the store."""
        parts = [super(FilteredStore, self).read(first, last) for _, first, last in self._spans(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents_in(self, start: int, stop: int) -> list[DocumentPlace]:
        """The documents that have a token in [start, stop), by their number in the whole store."""
        return [self._place(row) for row, _, _ in self._spans(start, stop)]

    def source_at(self, offset: int) -> int:
        """Index in ``sources`` of the document that holds token ``offset``."""
        row, _, _ = next(self._spans(offset, offset + 1))
        return int(self.documents["source"][row])

    def _place(self, row: int) -> DocumentPlace:
        document = self.documents[row]
        return DocumentPlace(row, self.sources[int(document["source"])], int(document["date"]))

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Row and first and last token in the store of each chosen document in [start, stop) of the chosen tokens."""
        while start < stop:
            block = self._block(int(np.searchsorted(self._sums, start, side="right")) - 1)
            index = int(np.searchsorted(block.places, start, side="right")) - 1
            first = int(block.offsets[index]) + start - int(block.places[index])
            count = min(stop, int(block.places[index + 1])) - start
            yield int(block.rows[index]), first, first + count
            start += count

    def _block(self, number: int) -> _Block:
        if number not in self._blocks:
            while len(self._blocks) >= KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            first = number * BLOCK
            chosen, lengths = self._chosen(first, min(first + BLOCK, self.all_documents))
            rows = np.flatnonzero(chosen)
            places = self._sums[number] + np.concatenate([[0], np.cumsum(lengths[rows])])
            self._blocks[number] = _Block(places, self.documents["offset"][first + rows], first + rows)
        return self._blocks[number]

    def _survey(self) -> tuple[npt.NDArray[np.int64], int]:
        """Chosen tokens of each block, and the number of chosen documents."""
        tokens, documents = [], 0
        for start, stop in self._stretches():
            chosen, lengths = self._chosen(start, stop)
            tokens.append(np.add.reduceat(lengths * chosen, np.arange(0, stop - start, BLOCK)))
            documents += int(chosen.sum())
        return np.concatenate(tokens), documents

    def _chosen(self, start: int, stop: int) -> tuple[Mask, npt.NDArray[np.int64]]:
        """Which of the documents [start, stop) are chosen, and the tokens of each."""
        ends = np.append(self.documents["offset"][start : stop + 1], self.all_tokens)[: stop - start + 1]
        return self._settled.mask(self._values(start, stop), stop - start), np.diff(ends)

    def _values(self, start: int, stop: int) -> Values:
        def values(key: str) -> Column:
            return self.values(key, start, stop)

        return values

    def _stretches(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.all_documents, STRETCH):
            yield start, min(start + STRETCH, self.all_documents)
