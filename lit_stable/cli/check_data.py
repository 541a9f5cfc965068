"""What `lit-stable check` says about the data: what is there, what is kept, and what a run reads of it."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Callback

from lit_stable.callbacks import BatchSizeWarmup
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.description import describe_data, describe_reading


def reading(data: TokenDataModule, features: Mapping[str, Callback], max_steps: int) -> str:
    """Lines about stores, order and weights, and the samples and epochs of each source in ``max_steps``."""
    opened = bool(data.opened.training)
    lines = ["data:" if opened else "data: built in; opened by the first fit"]
    lines += [f"  {line}" for line in describe_data(data)]
    if opened and max_steps > 0:
        ramp = next((f for f in features.values() if isinstance(f, BatchSizeWarmup)), None)
        samples = (data.samples_before if ramp is None else ramp.samples_before)(max_steps + 1)
        lines += [f"in {max_steps:,} steps:", *describe_reading(data, samples)]
    return "\n".join(lines)
