"""One run that goes on with other numbers of ranks: 4, then 2, then 4. Each leg is a launch of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import rank_scenarios
from eight_bit_models import digest, eight_bit
from rank_scenarios import main, scenario
from rank_scenarios_eight_bit import NoteStates
from tiny_gpt_run import SaveEveryMicroBatch, fit


def _leg(
    name: str, ranks: int, steps: int, begins_with: str | None = None, saves: tuple[int, ...] = ()
) -> dict[str, Any]:
    root = Path(os.environ["SCENARIO_FOLDER"])
    folder, note = root / name, NoteStates()
    accelerator = rank_scenarios.ACCELERATOR
    run = fit(
        "fsdp2",
        devices=ranks,
        steps=steps,
        accelerator=accelerator,
        precision="32-true" if accelerator == "cpu" else "bf16-mixed",
        dropout=0.0,
        ckpt_path=None if begins_with is None else root / begins_with,
        callbacks=(eight_bit(), note, SaveEveryMicroBatch(folder, only=saves)),
    )
    return {"rows": run.rows, **{when: digest(states) for when, states in note.at.items()}}


@scenario
def whole() -> dict[str, Any]:
    return _leg("whole", 4, 6)


@scenario
def first() -> dict[str, Any]:
    return _leg("first", 4, 2, saves=(2,))


@scenario
def second() -> dict[str, Any]:
    return _leg("second", 2, 4, "first/m2.ckpt", saves=(4,))


@scenario
def third() -> dict[str, Any]:
    return _leg("third", 4, 6, "second/m4.ckpt")


if __name__ == "__main__":
    main()
