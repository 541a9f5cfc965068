"""Write a token store, documents one by one or many at once, in bounded memory; ``store`` describes the files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lit_stable.data.atomic_folder import new_folder
from lit_stable.data.columns import CODE, MISSING_CODE, NUMBER, Column, ColumnBuilder
from lit_stable.data.store import CHECKSUM, CHUNK_BYTES, DOCUMENT, column_file, store_format, token_dtype


class TokenStoreWriter:
    """Context manager that turns documents into a token store at ``path``.

    The folder takes its name only when the block ends without an exception.

    Args:
        path: Folder to create.
        vocab_size: Every id must be below it; decides the dtype.
        eot_id: Written behind each document.
        tokenizer: Path of the tokenizer file, relative to the store.
        tokenizer_sha256: Hash of that file; stores are mixed only when it agrees.
        split: ``train`` or ``validation``.
        columns: Keys of which a value is kept per document, and whether it is a text.
        shard_bytes: Size of a full shard, a multiple of 64 KiB.

    Raises:
        ValueError: when a token is out of the vocabulary, ``shard_bytes`` is no multiple of 64 KiB, or the block ends
            without a document.
        FileExistsError: when ``path`` exists.

    Example::

        with TokenStoreWriter(folder, vocab_size=257, eot_id=256, tokenizer="tokenizer.json",
                              tokenizer_sha256=sha256, split="train") as writer:
            writer.add(np.array([104, 105]), source="notes", date=20240229)
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab_size: int,
        eot_id: int,
        tokenizer: str,
        tokenizer_sha256: str,
        split: str,
        columns: Mapping[str, bool] | None = None,
        shard_bytes: int = 1 << 30,
    ) -> None:
        if shard_bytes < CHUNK_BYTES or shard_bytes % CHUNK_BYTES:
            raise ValueError(f"shard_bytes={shard_bytes}: must be a positive multiple of {CHUNK_BYTES}.")
        self.path = path
        self.num_tokens = 0
        self.num_documents = 0
        self._fields = {
            "split": split,
            "vocab_size": vocab_size,
            "eot_id": eot_id,
            "tokenizer": tokenizer,
            "tokenizer_sha256": tokenizer_sha256,
        }
        self._vocab_size, self._eot_id, self._dtype = vocab_size, eot_id, token_dtype(vocab_size)
        self._shard_bytes = shard_bytes
        self._shard_sizes: list[int] = []  # bytes
        self._shard: BinaryIO | None = None
        self._pending = bytearray()  # less than one chunk between two calls of `add`
        self._sources = ColumnBuilder("source")
        self._is_text = dict(columns or {})
        self._columns = {key: ColumnBuilder(key) for key in self._is_text}
        tables = ["documents.bin", "checksums.bin", *map(column_file, self._is_text)]
        self._crc32 = dict.fromkeys(tables, 0)

    def __enter__(self) -> TokenStoreWriter:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(new_folder(self.path))
        self._tables = {name: self._stack.enter_context((self._folder / name).open("wb")) for name in self._crc32}
        self._stack.callback(self._close_shard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._stack:
                self._finish()
        else:
            self._stack.__exit__(kind, error, trace)

    def add(self, tokens: npt.ArrayLike, source: str, date: int = 0) -> None:
        """Append one document and the end-of-text token.

        Args:
            tokens: Ids, integers of shape (N,).
            source: Name of the source that the document came from.
            date: yyyymmdd, 0 when unknown.
        """
        ids = np.append(np.asarray(tokens, dtype=np.int64), self._eot_id)
        self.add_many(ids, [ids.size], Column(np.zeros(1, dtype=CODE), [source]), [date])

    def add_many(
        self,
        tokens: npt.NDArray[Any],
        lengths: Sequence[int] | npt.NDArray[np.int64],
        sources: Column,
        dates: Sequence[int] | npt.NDArray[np.int32],
        kept: Mapping[str, Column | None] | None = None,
    ) -> None:
        """Append documents that follow each other, each with the end-of-text token behind it.

        Args:
            tokens: Ids of all, (M,).
            lengths: Tokens of each document, end-of-text included, (D,).
            sources: Name of the source of each.
            dates: yyyymmdd of each, 0 when unknown, (D,).
            kept: Values of each for the ``columns``; None and what is left out: no document has one.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise ValueError(
                f"document {self.num_documents} or later: token ids {tokens.min()} to {tokens.max()} must be from 0 "
                f"to {self._vocab_size - 1}; use the tokenizer that the vocabulary size belongs to."
            )
        documents = np.zeros(len(lengths), dtype=DOCUMENT)
        documents["offset"] = self.num_tokens + np.cumsum(lengths) - lengths
        documents["source"] = self._sources.add(sources)
        documents["date"] = dates
        self._append("documents.bin", documents.tobytes())
        for key in self._columns:
            self._append(column_file(key), self._values(key, (kept or {}).get(key), len(lengths)).tobytes())
        self.num_tokens += tokens.size
        self.num_documents += len(lengths)
        self._pending += tokens.astype(self._dtype).tobytes()
        self._write_chunks()

    def _values(self, key: str, column: Column | None, count: int) -> npt.NDArray[Any]:
        if column is not None:
            return self._columns[key].add(column)
        return np.full(count, MISSING_CODE, CODE) if self._is_text[key] else np.full(count, np.nan, NUMBER)

    def _append(self, table: str, record: bytes) -> None:
        self._tables[table].write(record)
        self._crc32[table] = zlib.crc32(record, self._crc32[table])

    def _write_chunks(self, last: bool = False) -> None:
        begin = 0
        while begin + (1 if last else CHUNK_BYTES) <= len(self._pending):
            self._write_chunk(bytes(self._pending[begin : begin + CHUNK_BYTES]))
            begin += CHUNK_BYTES
        del self._pending[:begin]

    def _write_chunk(self, chunk: bytes) -> None:
        if self._shard is None or self._shard_sizes[-1] == self._shard_bytes:
            self._close_shard()
            self._shard = (self._folder / _shard_name(len(self._shard_sizes))).open("wb")
            self._shard_sizes.append(0)
        self._shard.write(chunk)
        self._shard_sizes[-1] += len(chunk)
        self._append("checksums.bin", np.array(zlib.crc32(chunk), dtype=CHECKSUM).tobytes())

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()

    def _finish(self) -> None:
        if self.num_documents == 0:
            raise ValueError(f"{self.path}: no document was written; the input is empty.")
        self._write_chunks(last=True)
        index = (
            {"format": store_format(self._is_text)}
            | self._fields
            | {
                "dtype": self._dtype.str,
                "num_tokens": self.num_tokens,
                "num_documents": self.num_documents,
                "sources": list(self._sources.texts or {}),
                "documents_crc32": self._crc32["documents.bin"],
                "checksums_crc32": self._crc32["checksums.bin"],
                "shards": [
                    {"name": _shard_name(number), "num_tokens": size // self._dtype.itemsize}
                    for number, size in enumerate(self._shard_sizes)
                ],
            }
        )
        if self._is_text:
            index["columns"] = [self._column_index(key) for key in self._is_text]
        (self._folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def _column_index(self, key: str) -> dict[str, Any]:
        texts = list(self._columns[key].texts or {}) if self._is_text[key] else None
        return {"key": key, "texts": texts, "crc32": self._crc32[column_file(key)]}


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"
