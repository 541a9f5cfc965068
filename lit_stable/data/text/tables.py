"""Rows of Parquet files and of Hugging Face data sets, as records."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_stable.data.text.documents import Fields

DATASET_PREFIX = "hf:"
_DATASET = re.compile(r"hf:(?P<name>[^@]+?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>.+))?")
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves
_ROWS = 1000  # held in memory at once


def row_group_bytes(file: Path, fields: Fields) -> list[int]:
    """Uncompressed size of each row group of a Parquet file.

    Raises:
        ValueError: when the package is missing, or the file is damaged or has no column of texts.
    """
    parquet = _open_parquet(file)
    _require_text(str(file), parquet.schema_arrow.names, fields)
    metadata = parquet.metadata
    return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]


def parquet_rows(file: Path, start: int, stop: int | None, fields: Fields) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, counted through the file, and record of each row of the row groups [start, stop)."""
    parquet = _open_parquet(file)
    groups = range(start, parquet.metadata.num_row_groups if stop is None else stop)
    number = sum(parquet.metadata.row_group(group).num_rows for group in range(start))
    columns = _columns(parquet.schema_arrow.names, fields)
    for batch in parquet.iter_batches(batch_size=_ROWS, row_groups=list(groups), columns=columns):
        for record in batch.to_pylist():
            yield number, record
            number += 1


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by a data set's ``save_to_disk``."""
    return any((path / name).is_file() for name in _SAVED)


def dataset_size(name: str, fields: Fields) -> tuple[int, int, int]:
    """Rows, bytes, and a number that tells one content from another, of a data set named ``hf:NAME[:CONFIG][@SPLIT]``.

    Raises:
        ValueError: when the package is missing, or the data set cannot be loaded or has no column of texts.
    """
    dataset = _open_dataset(name)
    _require_text(name, dataset.column_names, fields)
    # Not public, and the only thing that changes with the content of every kind of data set.
    return len(dataset), dataset.data.nbytes, zlib.crc32(dataset._fingerprint.encode())


def dataset_rows(name: str, start: int, stop: int | None, fields: Fields) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and record of the rows [start, stop) of a data set."""
    dataset = _open_dataset(name)
    wanted = {key for key in dataset.column_names for path in fields.keys if key in (path, path.split(".")[0])}
    dataset = dataset.select_columns(sorted(wanted)).with_format(None)
    stop = len(dataset) if stop is None else stop
    for first in range(start, stop, _ROWS):
        columns = dataset[first : min(first + _ROWS, stop)]
        for number, row in enumerate(zip(*columns.values(), strict=True), start=first):
            yield number, dict(zip(columns, row, strict=True))


def _columns(names: Sequence[str], fields: Fields) -> list[str]:
    """Of the wanted keys those that the file has: ``a.b`` is read as a column of that name, else as b inside a."""
    return [key for key in dict.fromkeys(fields.keys) if key in names or key.split(".")[0] in names]


def _require_text(name: str, columns: Sequence[str], fields: Fields) -> None:
    if fields.text_key not in columns:
        raise ValueError(f"{name}: has no column {fields.text_key}; set text_key to one of {', '.join(columns)}.")


def _open_parquet(file: Path) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"{file}: needs the package pyarrow; pip install 'lit-stable[data]'.") from error
    try:
        return parquet.ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file}: is no Parquet file, or is damaged ({error}).") from error


@functools.lru_cache(maxsize=4)  # asked for by every piece
def _open_dataset(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{name}: needs the package datasets; pip install 'lit-stable[datasets]'.") from error
    match = _DATASET.fullmatch(name)
    if match is None:
        raise ValueError(f"{name}: must read hf:NAME, hf:NAME:CONFIG or hf:FOLDER, with @SPLIT behind it if not train.")
    split = match["split"] or "train"
    try:
        if not is_saved_dataset(Path(match["name"])):
            return datasets.load_dataset(match["name"], match["config"], split=split)
        loaded = datasets.load_from_disk(match["name"])
    except Exception as error:  # the package has no base class for what may go wrong with a name or a network
        raise ValueError(f"{name}: cannot be loaded ({' '.join(str(error).split())}).") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(f"{name}: has no split {split}; write @SPLIT behind it, with one of {', '.join(loaded)}.")
    return loaded[split]
