"""A checkpoint as it is at one moment, and the file that torch loads, written from it piece by piece.

``torch.save`` holds the interpreter's lock for the whole of each tensor, which it checksums and writes in C++: from a
thread it stops training for the most part of a save. Lightning moreover saves into memory and copies that once before
it writes. Here a piece is read from the device, checksummed and written at a time, and none of it holds the lock.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from .private_storage_names import as_stored, typed_storage

_PIECE = 1 << 24  # bytes that are read from the device, checksummed and written at a time
_ALIGNMENT = 64  # bytes: where a tensor begins in the file, so that it can be used where it is mapped
_LOCAL_HEADER, _ZIP64_FIELD = 30, 20  # bytes, of a record in a zip file, beside its name
_FORMAT = b"3\n"  # of torch's zip files since 1.6

_Key = tuple[torch.device, int, int, Any]  # of a storage: device, address, bytes, class that stands for its dtype


class Snapshot:
    """A tree of anything that can be pickled, with tensors; what is no tensor is as it was when this was made.

    Tensors that share storage share it in the file, so that tied weights are written once.

    Args:
        tree: What to save: mostly nested dictionaries and lists.

    Raises:
        Exception: what ``pickle`` raises of something that cannot be pickled; no file is begun.
    """

    def __init__(self, tree: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, protocol=2)  # the one that torch.load reads with weights_only
        pickler.dump(tree)
        self._pickled = buffer.getvalue()
        self._storages, self._dtypes = pickler.storages, pickler.dtypes

    def copy_to_host(self) -> None:
        """Copy the tensors to the host's memory, so that training may change them.

        The memory is page-locked for what lies on a CUDA device. torch keeps it for the next time: page-locking 1 GiB
        takes longer than copying 10.
        """
        copies = []
        for storage in self._storages:
            on_cuda = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=on_cuda).untyped_storage()
            copies.append(copy.copy_(storage, non_blocking=on_cuda))
        for device in {storage.device for storage in self._storages if storage.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._storages = copies

    def tree(self) -> Any:
        """What it was made of, with the tensors that are held here and copies of all else."""
        return _Unpickler(io.BytesIO(self._pickled), self._storages, self._dtypes).load()

    def write(self, path: Path) -> None:
        """Write the file that ``torch.load`` reads, with memory mapping too; all tensors are said to be of the CPU."""
        try:
            self.write_to(path)
        except BaseException:
            path.unlink(missing_ok=True)  # closed half-way it would pass for whole: a zip file without what was to come
            raise

    def write_to(self, file: Path | IO[bytes]) -> None:
        """The same, into an open file: from where that is, and what was written counts from there."""
        target: Any = file if isinstance(file, Path) else _FromHere(file)
        with zipfile.ZipFile(target, "w") as archive:  # not compressed
            _write_record(archive, "data.pkl", self._pickled)
            _write_record(archive, "byteorder", sys.byteorder.encode())
            for number, storage in enumerate(self._storages):
                _write_storage(archive, f"data/{number}", storage)
            _write_record(archive, "version", _FORMAT)


class _Pickler(pickle.Pickler):
    """Sets storages aside and puts into their place what ``torch.load`` expects there."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.storages: list[torch.UntypedStorage] = []
        self.dtypes: list[torch.dtype] = []
        self._numbers: dict[_Key, int] = {}

    def persistent_id(self, obj: Any) -> tuple[str, Any, str, str, int] | None:
        stored = as_stored(obj)
        if stored is None:
            return None
        storage, dtype, kind, elements = stored
        # By dtype too: torch.load gives a storage one dtype, that of the first tensor it meets.
        key = (storage.device, storage.data_ptr(), storage.nbytes(), kind)
        if key not in self._numbers or not storage.data_ptr():  # storages without bytes are all at address 0
            self._numbers[key] = len(self.storages)
            self.storages.append(storage)
            self.dtypes.append(dtype)
        return "storage", kind, str(self._numbers[key]), "cpu", elements


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage], dtypes: list[torch.dtype]) -> None:
        super().__init__(file)
        self._typed = list(zip(storages, dtypes, strict=True))

    def persistent_load(self, pid: Any) -> Any:
        _, _, number, _, _ = pid
        return typed_storage(*self._typed[int(number)])


class _FromHere:
    """What is behind the place where an open file is, as a file of its own; all of it that ``zipfile`` uses."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._start = file, file.tell()
        self.write, self.flush = file.write, file.flush

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, place: int) -> int:
        return self._file.seek(self._start + place) - self._start


def _write_record(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(_record(archive, name, len(content)), content)


def _write_storage(archive: zipfile.ZipFile, name: str, storage: torch.UntypedStorage) -> None:
    on_host = storage.device.type == "cpu"
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    with archive.open(_record(archive, name, storage.nbytes()), "w") as record:
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            record.write((piece if on_host else piece.cpu()).numpy().data)


def _record(archive: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    """The head of a record of so many bytes, with a filler of zeros by which they begin at a multiple of 64 bytes."""
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = size
    assert archive.fp is not None
    head = archive.fp.tell() + _LOCAL_HEADER + len(info.filename.encode())
    if size * 1.05 > zipfile.ZIP64_LIMIT:  # as `ZipFile.open` judges it
        head += _ZIP64_FIELD
    filler = -(head + 4) % _ALIGNMENT
    info.extra = b"FB" + filler.to_bytes(2, "little") + bytes(filler)  # the field that torch fills with
    return info
