"""Read a token store: a folder of token shards with an index.

``index.json``        format, dtype, vocab_size, eot_id, split, sources, shard sizes, tokenizer, checksums of the tables
``shard-00000.bin``   tokens, raw little-endian uint16 (vocabulary up to 65 536) or uint32; documents end with eot
``documents.bin``     one record (offset int64, source int32, date int32) per document, in order of offset
``column-KEY.bin``    one kept value per document: float64 (NaN: none), or int32, the number of a text in the index (-1)
``checksums.bin``     CRC-32 (uint32) of every 64 KiB of every shard, in order

Opening reads the index and compares file sizes: neither time nor memory depends on the number of tokens. Each 64 KiB
is checked against its checksum when it is first touched, so a damaged file raises instead of training on noise.

Windows are read by position from the page cache. Mapping the shards costs as much time, but the process then seems to
grow with every page it has touched, and a shard that is cut during the run ends it by SIGBUS instead of a sentence.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sized
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_stable.data.columns import CODE, NUMBER, Column

FORMAT = 2  # the newest that is read; 1 had no columns
_KEYS = (
    *("dtype", "num_tokens", "num_documents", "vocab_size", "eot_id", "split", "sources", "tokenizer"),
    *("tokenizer_sha256", "shards", "checksums_crc32", "documents_crc32"),
)
CHUNK_BYTES = 65_536
MAX_OPEN_FILES = 256  # per store; many systems allow a process 1024
DOCUMENT = np.dtype([("offset", "<i8"), ("source", "<i4"), ("date", "<i4")])
CHECKSUM = np.dtype("<u4")

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class DamagedStore(ValueError):
    """A file of a token store does not say what it said when it was written; found while reading."""


class DocumentPlace(NamedTuple):
    """Where a document stands: its number in the store, the name of its source, its date as yyyymmdd (0: none)."""

    number: int
    source: str
    date: int


class TokenStore:
    """A sequence of tokens on disk, cut into non-overlapping windows on demand.

    Safe to send to worker processes: only the path travels.

    Args:
        path: Folder that holds ``index.json``.

    Raises:
        ValueError: when the folder is no token store, its format is newer than this code, or a file is missing or has
            the wrong size; when reading, that a part of a shard does not match its checksum. The file is named.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._files: dict[int, FileIO] = {}
        index = _read_index(self.path / "index.json")
        self.dtype = np.dtype(index["dtype"])
        self.num_tokens: int = index["num_tokens"]
        self.num_documents: int = index["num_documents"]
        self.vocab_size: int = index["vocab_size"]
        self.eot_id: int = index["eot_id"]
        self.split: str = index["split"]
        self.sources: list[str] = index["sources"]
        self.tokenizer_path = self.path / index["tokenizer"]
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self._shard_names: list[str] = [shard["name"] for shard in index["shards"]]
        sizes = np.array([shard["num_tokens"] for shard in index["shards"]], dtype=np.int64)
        self._shard_starts = np.concatenate([[0], np.cumsum(sizes)])  # (shards + 1,) in tokens
        chunks = -(-sizes * self.dtype.itemsize // CHUNK_BYTES)
        self._chunk_starts = np.concatenate([[0], np.cumsum(chunks)])
        for name, size in zip(self._shard_names, sizes, strict=True):
            _require_size(self.path / name, int(size) * self.dtype.itemsize)
        _require_size(self.path / "documents.bin", self.num_documents * DOCUMENT.itemsize)
        _require_size(self.path / "checksums.bin", int(self._chunk_starts[-1]) * CHECKSUM.itemsize)
        self._column_index: dict[str, Any] = {column["key"]: column for column in index.get("columns", [])}
        for key in self._column_index:
            _require_size(self.path / column_file(key), self.num_documents * self._column_dtype(key).itemsize)
        self._checksums = np.fromfile(self.path / "checksums.bin", dtype=CHECKSUM)
        if zlib.crc32(self._checksums.data) != index["checksums_crc32"]:
            raise ValueError(f"{self.path / 'checksums.bin'}: does not match the index; prepare the data again.")
        self._documents_crc32: int = index["documents_crc32"]
        # Of the checksums of all chunks: two stores with the same tokens have the same one.
        self.identity = f"{index['checksums_crc32']:08x}"
        self.index_crc32: str = index["crc32"]
        self._tables: dict[str, npt.NDArray[Any]] = {}
        self._verified = np.zeros(len(self._checksums), dtype=bool)

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.path,)

    def num_windows(self, length: int) -> int:
        """How many windows of ``length`` inputs fit; each needs one more token as the last label."""
        return max(0, (self.num_tokens - 1) // length)

    def window(self, number: int, length: int) -> Tokens:
        """Tokens [number * length, number * length + length + 1), shape (length + 1,)."""
        if not 0 <= number < self.num_windows(length):
            raise ValueError(f"{self.path}: window {number} is not among the {self.num_windows(length)} it holds.")
        return self.read(number * length, number * length + length + 1)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop), in the dtype of the store."""
        parts: list[Tokens] = []
        shard = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self._shard_starts[shard]), int(self._shard_starts[shard + 1])
            parts.append(self._read_shard(shard, start - first, min(stop, end) - first))
            start, shard = min(stop, end), shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents_in(self, start: int, stop: int) -> list[DocumentPlace]:
        """The documents that have a token in [start, stop)."""
        documents = self.documents
        first = int(np.searchsorted(documents["offset"], start, side="right")) - 1
        last = int(np.searchsorted(documents["offset"], stop - 1, side="right"))
        rows = documents[first:last].tolist()
        return [DocumentPlace(first + n, self.sources[source], date) for n, (_, source, date) in enumerate(rows)]

    @property
    def documents(self) -> npt.NDArray[np.void]:
        """Offset, source and date of every document, mapped from the file."""
        return self._table("documents.bin", DOCUMENT, self._documents_crc32)

    @property
    def keys(self) -> list[str]:
        """Of what there is a value per document: date, source and the kept keys."""
        return ["date", "source", *self._column_index]

    def values(self, key: str, start: int, stop: int) -> Column:
        """The values of one of the ``keys``, of the documents [start, stop); a date is a number, yyyymmdd."""
        documents = self.documents[start:stop]
        if key == "source":
            return Column(documents["source"], self.sources)
        if key == "date":
            return Column(np.where(documents["date"] == 0, np.nan, documents["date"]))
        dtype, index = self._column_dtype(key), self._column_index[key]
        return Column(self._table(column_file(key), dtype, index["crc32"])[start:stop], index["texts"])

    def source_at(self, offset: int) -> int:
        """Index in ``sources`` of the document that holds token ``offset``."""
        return int(self.documents["source"][np.searchsorted(self.documents["offset"], offset, side="right") - 1])

    def document_at(self, offset: int) -> DocumentPlace:
        """The document that holds token ``offset``."""
        return self.documents_in(offset, offset + 1)[0]

    def _read_shard(self, shard: int, start: int, stop: int) -> Tokens:
        itemsize = self.dtype.itemsize
        for chunk in range(start * itemsize // CHUNK_BYTES, (stop * itemsize - 1) // CHUNK_BYTES + 1):
            number = int(self._chunk_starts[shard]) + chunk
            if not self._verified[number]:
                if zlib.crc32(self._read_bytes(shard, chunk * CHUNK_BYTES, CHUNK_BYTES)) != self._checksums[number]:
                    raise DamagedStore(
                        f"{self.path / self._shard_names[shard]}: bytes from {chunk * CHUNK_BYTES} on do not match "
                        "their checksum; copy the file again or prepare the data again."
                    )
                self._verified[number] = True
        content = self._read_bytes(shard, start * itemsize, (stop - start) * itemsize)
        if len(content) < (stop - start) * itemsize:
            raise DamagedStore(f"{self.path / self._shard_names[shard]}: was cut while in use; copy the file again.")
        return np.frombuffer(content, dtype=self.dtype)

    def _read_bytes(self, shard: int, offset: int, count: int) -> bytes:
        if shard not in self._files:
            while len(self._files) >= MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[shard] = (self.path / self._shard_names[shard]).open("rb", buffering=0)
        # Forked workers share the file's offset, which pread neither uses nor moves.
        return os.pread(self._files[shard].fileno(), count, offset)

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def _column_dtype(self, key: str) -> np.dtype[Any]:
        return NUMBER if self._column_index[key]["texts"] is None else CODE

    def _table(self, name: str, dtype: np.dtype[Any], crc32: int) -> npt.NDArray[Any]:
        if name not in self._tables:
            table = np.memmap(self.path / name, dtype=dtype, mode="r")
            if zlib.crc32(table.data) != crc32:
                raise DamagedStore(f"{self.path / name}: does not match its checksum; prepare the data again.")
            self._tables[name] = table
        return self._tables[name]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32, little-endian, that holds every id below ``vocab_size``."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def store_format(columns: Sized) -> int:
    """The oldest format that holds these columns, so that older versions read all that they can."""
    return 2 if columns else 1


def column_file(key: str) -> str:
    """The file of a kept key."""
    return f"column-{key}.bin"


def _read_index(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent}: is not a token store (no index.json); make one with `lit-stable prepare`.")
    text = path.read_bytes()
    try:
        index: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: is damaged ({error}); prepare the data again.") from error
    if not isinstance(index, dict) or "format" not in index:
        raise ValueError(f"{path}: is not the index of a token store; prepare the data again.")
    if index["format"] > FORMAT:
        raise ValueError(
            f"{path}: has format {index['format']}, this version reads up to {FORMAT}; upgrade lit-stable."
        )
    if missing := [key for key in _KEYS if key not in index]:
        raise ValueError(f"{path}: is damaged (it lacks {', '.join(missing)}); prepare the data again.")
    return {**index, "crc32": f"{zlib.crc32(text):08x}"}


def _require_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: is missing; copy the file again or prepare the data again.")
    if path.stat().st_size != size:
        raise ValueError(
            f"{path}: has {path.stat().st_size} bytes where the index says {size}; "
            "copy the file again or prepare the data again."
        )
