"""Where each session of a run began to read: with its recipe, all that the samples of its steps follow from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.pytorch import Trainer

from lit_stable.callbacks import Progress
from lit_stable.callbacks.line_file import append_lines
from lit_stable.callbacks.positions import Range
from lit_stable.callbacks.topology import data_parallel_size
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.reshuffle import Settled
from lit_stable.run.branch import read_parent, stored_recipes

FILE = "sessions.jsonl"
_LAST_STEP = 1 << 32  # its samples, by millions a step, are still numbers of 64 bits


@dataclass(frozen=True)
class Beginning:
    """The state of the data at the start of a session, or of another fit within it."""

    session: int
    """Which recipe file of the folder holds its recipe."""
    steps: int
    """Optimizer steps behind it."""
    samples: int
    """Samples consumed in them."""
    ranks: int
    """Data-parallel ranks."""
    dropped: Sequence[Range]
    """Ranges of the sample stream that are left out."""
    reshuffles: Sequence[Settled]
    """Where what is left is shuffled anew, passed and ahead."""
    stores: Mapping[str, str]
    """What the token stores hold, by key in the recipe."""


def beginning_of(trainer: Trainer, session: int) -> Beginning:
    """Where a trainer stands whose loader of training data is built."""
    progress = Progress.of(trainer)
    data: TokenDataModule = trainer.datamodule  # type: ignore[attr-defined]
    return Beginning(
        session,
        progress.steps,
        progress.samples,
        data_parallel_size(trainer),
        list(progress.dropped),
        list(data.reshuffles or []),
        data.fingerprint(),
    )


def write_beginning(folder: Path, beginning: Beginning) -> None:
    """Append to the file of a run folder; it is as it was where that fails."""
    append_lines(folder / FILE, [json.dumps(asdict(beginning))])


def read_beginnings(folder: Path) -> list[Beginning]:
    """All of a run, in the order in which they happened; a line that a kill cut short is left out.

    Raises:
        ValueError: when the folder has none, or a whole line is not one: what it said of its steps is not known.
    """
    found = []
    path = folder / FILE
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        try:
            fields["dropped"] = [(start, stop) for start, stop in fields["dropped"]]
            fields["reshuffles"] = [Settled(*reshuffle) for reshuffle in fields["reshuffles"]]
            found.append(Beginning(**fields))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path}: line {number} does not say where a session began ({line[:60]}); put it back as it was, or"
                " delete it: its steps then count as those of the session before."
            ) from error
    if lines and not found:
        raise ValueError(f"{path}: none of its {len(lines)} lines can be read; put it back as it was.")
    if not found:
        raise ValueError(
            f"{folder}: has no {FILE}, so it is no run folder, or its run never began; give ROOT/NAME/0001."
        )
    return found


def session_of_step(folder: Path, step: int) -> tuple[Path, Beginning]:
    """The run folder in which a step was taken, the given one or one it grew out of, and where the session began.

    Of several sessions that took it, the last one counts.

    Raises:
        ValueError: when the step is none, or was taken in a folder that is not there.
    """
    if step < 1:
        raise ValueError(f"step={step}: optimizer steps count from 1.")
    if step > _LAST_STEP:
        raise ValueError(f"step={step}: no run has so many; give one of its steps.")
    beginnings = read_beginnings(folder)
    covering = [one for one in beginnings if one.steps < step]
    if covering:
        return folder, covering[-1]
    parent = read_parent(folder)
    origin = None if parent is None else Path(os.path.normpath(folder / parent.run))
    if origin is None or not stored_recipes(origin):
        raise ValueError(
            f"step={step}: was taken before {folder} began, behind step {beginnings[0].steps}, and the run folder that"
            " it grew out of is not there."
        )
    return session_of_step(origin, step)
