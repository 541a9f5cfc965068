"""The scalars of any run, ours or another's, read from TensorBoard event files or CSV."""

from __future__ import annotations

import codecs
import csv
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

#: What detectors call a scalar -> the names that trainers log it under, in lower case with `_` for any separator.
NAMES = {
    "loss": ("train_loss", "loss", "training_loss", "lm_loss", "train_lm_loss", "train_ce_loss", "loss_train"),
    "val_loss": (
        "val_loss",
        "validation_loss",
        "valid_loss",
        "eval_loss",
        "lm_loss_validation",
        "loss_val",
        "dev_loss",
    ),
    "grad_norm": ("stability_grad_norm", "grad_norm", "gnorm", "gradient_norm", "train_grad_norm", "total_norm"),
    "loss_scale": ("monitor_loss_scale", "stability_loss_scale", "loss_scale", "train_loss_scale", "scaler_scale"),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate"),
}
_STEP_COLUMNS = ("step", "global_step", "trainer_global_step", "iteration", "iter", "update", "num_updates")


@dataclass(frozen=True)
class Scalars:
    """A run's scalars by step, in order."""

    rows: list[tuple[int, dict[str, float]]]
    """(step, value by name): names of ``NAMES`` where one is recognised, else as they were logged."""
    called: dict[str, str]
    """Recognised name -> the one it was logged under."""

    @property
    def every(self) -> int:
        """Steps between two values of the loss, the median."""
        steps = [step for step, values in self.rows if "loss" in values]
        gaps = sorted(b - a for a, b in pairwise(steps))
        return max(1, gaps[len(gaps) // 2]) if gaps else 1


def read_scalars(path: Path, renamed: dict[str, str] | None = None) -> Scalars:
    """Read a CSV file, a TensorBoard event file, or every such file below a folder.

    Of several files (a run that was resumed) the later begins where the earlier is no longer true: points of the
    earlier from that step on are dropped.

    Args:
        path: File or folder.
        renamed: Detectors' name -> column or tag, for names that are not recognised.

    Raises:
        ValueError: when nothing is there to read, or no loss is among it.
    """
    if not path.exists():
        raise ValueError(f"{path}: does not exist; give a CSV file, a TensorBoard event file or a run's folder.")
    tables = [table for file in _files(path) if (table := _read(file))]
    if not tables:
        raise ValueError(f"{path}: holds no scalars; give a CSV file, a TensorBoard event file or a run's folder.")
    merged: dict[int, dict[str, float]] = {}
    for table in sorted(tables, key=lambda table: min(table)):
        start = min(table)
        for series in {name for values in table.values() for name in values}:
            for step in [s for s in merged if s >= start]:
                merged[step].pop(series, None)
        for step, values in table.items():
            merged.setdefault(step, {}).update(values)
    return _recognise(merged, renamed or {}, path)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    events = sorted(path.rglob("events.out.tfevents.*"))
    return events or sorted(path.rglob("*.csv"))


def _read(path: Path) -> dict[int, dict[str, float]]:
    return _read_events(path) if "tfevents" in path.name else _read_csv(path)


def _read_csv(path: Path) -> dict[int, dict[str, float]]:
    table: dict[int, dict[str, float]] = {}
    with _refusing_what_is_no_csv(path), path.open(newline="", encoding=_encoding(path), errors="replace") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            values = {key: value for key, text in row.items() if key and (value := _number(text)) is not None}
            step = next((values.pop(name) for name in values if _plain(name) in _STEP_COLUMNS), float(number))
            if math.isfinite(step):
                table.setdefault(int(step), {}).update(values)
    return {step: values for step, values in table.items() if values}


def _encoding(path: Path) -> str:
    """UTF-8, or UTF-16 where the file begins as one. In others the names of scalars and numbers are the same bytes."""
    with path.open("rb") as file:
        start = file.read(1 << 12)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in start.partition(b"\n")[0]:  # behind it a crash of the machine may have left some
        raise ValueError(
            f"{path}: is no text but binary data; give a CSV file, a TensorBoard event file or a run's folder."
        )
    return "utf-8-sig"


@contextmanager
def _refusing_what_is_no_csv(path: Path) -> Iterator[None]:
    allowed = csv.field_size_limit(sys.maxsize)  # of notes beside the numbers
    try:
        yield
    except (OSError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read as CSV ({why}); give the log that the trainer wrote.") from error
    finally:
        csv.field_size_limit(allowed)


def _number(text: object) -> float | None:
    try:
        return float(text) if isinstance(text, str) and text.strip() else None
    except ValueError:
        return None


def _read_events(path: Path) -> dict[int, dict[str, float]]:
    # Late: it costs a second, and only this needs it.
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator

    events = EventAccumulator(str(path), size_guidance={SCALARS: 0, TENSORS: 0})  # 0: all of them
    events.Reload()
    table: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            table.setdefault(event.step, {})[tag] = event.value
    return table


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _recognise(table: dict[int, dict[str, float]], renamed: dict[str, str], path: Path) -> Scalars:
    logged = sorted({name for values in table.values() for name in values})
    called = dict(renamed)
    for name, others in NAMES.items():
        match = next((one for other in others for one in logged if _plain(one) == other), None)
        if name not in called and match is not None:
            called[name] = match
    for name, one in called.items():
        if one not in logged:
            raise ValueError(f"names {name}={one}: {path} holds no such scalar; it holds {_shortened(logged)}.")
    if "loss" not in called:
        raise ValueError(f"{path}: no training loss among {_shortened(logged)}; give it, as in --names.loss NAME.")
    back = {one: name for name, one in called.items()}
    rows = [(step, {back.get(k, k): v for k, v in table[step].items()}) for step in sorted(table)]
    return Scalars([(step, values) for step, values in rows if values], called)


def _shortened(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
