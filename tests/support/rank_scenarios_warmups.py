"""Batch-size and sequence-length warm-up on two ranks; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

from typing import Any

from rank_scenarios import fit2, main, scenario, shared_folder
from tiny_gpt_run import GLOBAL_BATCH, LENGTH, MICRO_BATCH, SaveEveryMicroBatch

from lit_stable.callbacks import BatchSizeWarmup, Progress, SequenceLengthWarmup


def ramp() -> BatchSizeWarmup:
    """4, 4, 8, 8, ... samples per step."""
    return BatchSizeWarmup("4 for 2 steps", global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, lr_factor="sqrt")


def lengths() -> SequenceLengthWarmup:
    """4, 8, 8, 12, 16 tokens per sample."""
    return SequenceLengthWarmup(min_length=4, total_steps=5, max_length=LENGTH, multiple_of=4)


@scenario
def ramp_on_two_ranks() -> dict[str, Any]:
    """Saved after every micro-batch; the checkpoints load on one rank too."""
    folder = shared_folder()
    run = fit2("ddp", steps=5, windows=ramp(), callbacks=(SaveEveryMicroBatch(folder),))
    return {"rows": run.rows, "folder": str(folder), "mark": list(Progress.of(run.trainer).mark)}


@scenario
def lengths_on_two_ranks() -> dict[str, Any]:
    run = fit2("fsdp2", steps=6, callbacks=(lengths(),))
    return {"rows": run.rows, "mark": list(Progress.of(run.trainer).mark)}


if __name__ == "__main__":
    main()
