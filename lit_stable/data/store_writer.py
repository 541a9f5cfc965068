"""Write a token store document by document, in bounded memory; ``store`` describes the files."""

from __future__ import annotations

import json
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lit_stable.data.atomic_folder import new_folder
from lit_stable.data.store import CHECKSUM, CHUNK_BYTES, DOCUMENT, FORMAT, token_dtype


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
        shard_bytes: int = 1 << 30,
    ) -> None:
        if shard_bytes < CHUNK_BYTES or shard_bytes % CHUNK_BYTES:
            raise ValueError(f"shard_bytes={shard_bytes}: must be a positive multiple of {CHUNK_BYTES}.")
        self.path = path
        self.num_tokens = 0
        self.num_documents = 0
        self._fields = {
            "format": FORMAT,
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
        self._sources: dict[str, int] = {}
        self._crc32 = {"documents": 0, "checksums": 0}

    def __enter__(self) -> TokenStoreWriter:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(new_folder(self.path))
        self._tables = {
            name: self._stack.enter_context((self._folder / f"{name}.bin").open("wb")) for name in self._crc32
        }
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
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise ValueError(
                f"document {self.num_documents} of {source!r}: token ids {ids.min()} to {ids.max()} must be from 0 "
                f"to {self._vocab_size - 1}; use the tokenizer that the vocabulary size belongs to."
            )
        number = self._sources.setdefault(source, len(self._sources))
        self._append("documents", np.array([(self.num_tokens, number, date)], dtype=DOCUMENT).tobytes())
        self._pending += ids.astype(self._dtype).tobytes()
        self._pending += np.array(self._eot_id, dtype=self._dtype).tobytes()
        self.num_tokens += ids.size + 1
        self.num_documents += 1
        while len(self._pending) >= CHUNK_BYTES:
            self._write_chunk()

    def _append(self, table: str, record: bytes) -> None:
        self._tables[table].write(record)
        self._crc32[table] = zlib.crc32(record, self._crc32[table])

    def _write_chunk(self) -> None:
        chunk = bytes(self._pending[:CHUNK_BYTES])
        del self._pending[:CHUNK_BYTES]
        if self._shard is None or self._shard_sizes[-1] == self._shard_bytes:
            self._close_shard()
            self._shard = (self._folder / _shard_name(len(self._shard_sizes))).open("wb")
            self._shard_sizes.append(0)
        self._shard.write(chunk)
        self._shard_sizes[-1] += len(chunk)
        self._append("checksums", np.array(zlib.crc32(chunk), dtype=CHECKSUM).tobytes())

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()

    def _finish(self) -> None:
        if self.num_documents == 0:
            raise ValueError(f"{self.path}: no document was written; the input is empty.")
        if self._pending:
            self._write_chunk()
        index = self._fields | {
            "dtype": self._dtype.str,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "sources": list(self._sources),
            "documents_crc32": self._crc32["documents"],
            "checksums_crc32": self._crc32["checksums"],
            "shards": [
                {"name": _shard_name(number), "num_tokens": size // self._dtype.itemsize}
                for number, size in enumerate(self._shard_sizes)
            ],
        }
        (self._folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"
