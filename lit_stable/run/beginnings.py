"""Where each session of a run began to read: with its recipe, all that the samples of its steps follow from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.pytorch import Trainer

from lit_stable.callbacks import Progress
from lit_stable.callbacks.positions import Range
from lit_stable.callbacks.topology import data_parallel_size
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.reshuffle import Settled

FILE = "sessions.jsonl"


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
    """Append to the file of a run folder."""
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(asdict(beginning)) + "\n")


def read_beginnings(folder: Path) -> list[Beginning]:
    """All of a run, in the order in which they happened; a line that a kill cut short is left out.

    Raises:
        ValueError: when the folder has none.
    """
    found = []
    path = folder / FILE
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        fields["dropped"] = [(start, stop) for start, stop in fields["dropped"]]
        fields["reshuffles"] = [Settled(*reshuffle) for reshuffle in fields["reshuffles"]]
        found.append(Beginning(**fields))
    if not found:
        raise ValueError(
            f"{folder}: has no {FILE}, so it is no run folder, or its run never began; give ROOT/NAME/0001."
        )
    return found
