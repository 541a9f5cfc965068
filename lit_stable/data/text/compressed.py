"""Read a file as bytes whether it is compressed or not, and know how far in the file on disk one is."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

SUFFIXES = (".gz", ".zst")
_BLOCK = 1 << 20


class Bytes(NamedTuple):
    """The content of a file, and the file itself: ``raw.tell()`` says how much of it was used."""

    stream: BinaryIO
    raw: BinaryIO

    def skip(self, offset: int) -> None:
        """Go forward to a byte of the content."""
        if self.stream is self.raw:
            self.raw.seek(offset)
        while self.stream is not self.raw and offset > 0:
            offset -= len(self.stream.read(min(offset, _BLOCK))) or offset


def is_compressed(path: Path) -> bool:
    """By its name."""
    return path.suffix in SUFFIXES


def plain_suffix(path: Path) -> str:
    """The suffix below that of a compression: ``.jsonl`` of ``a.jsonl.gz``."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix


@contextmanager
def open_bytes(path: Path) -> Iterator[Bytes]:
    """Open a file; ``.gz`` and ``.zst`` are decompressed on the way.

    Raises:
        ValueError: when the package for ``.zst`` is missing, or the compressed content is cut short or damaged, at
            whatever point this shows.
    """
    with path.open("rb") as raw:
        try:
            yield Bytes(_content(path, raw), raw)
        except (EOFError, gzip.BadGzipFile, zlib.error, _Damaged) as error:
            raise ValueError(f"{path}: is cut short or damaged ({error}); get the file again.") from error


def _content(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BLOCK)
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(path, raw), _BLOCK)
    return raw


class _Damaged(Exception):
    """The decompressor's own complaint."""


class _Zstandard(io.RawIOBase):
    """Frames one after the other. The package's own reader takes a file that is cut inside a frame for complete."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"{path}: needs the package zstandard; pip install 'lit-stable[data]'.") from error
        self._error = zstandard.ZstdError
        # Windows beyond 128 MiB, which some published corpora use, must be asked for.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._raw = raw
        self._frame: Any = None
        self._rest = b""  # of the file, behind the frame that ended
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._rest or self._raw.read(_BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError("a frame has no end")
                return 0
            self._ready = memoryview(self._decompress(block))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            content: bytes = self._frame.decompress(block)
        except self._error as error:
            raise _Damaged(str(error)) from error
        self._rest = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return content
