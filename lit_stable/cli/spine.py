"""The callbacks that every fit of a recipe computes with, wherever it is written down."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback

from lit_stable.callbacks import (
    AccumulationWindows,
    BatchSizeWarmup,
    DeferredLogging,
    Detectors,
    Events,
    GradNorm,
    Progress,
    Recovery,
    SafeCheckpoints,
    StepSeed,
    ValidateEverySteps,
)
from lit_stable.callbacks.cadence import Every
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.run.loss_scale_watch import LossScaleWatch
from lit_stable.run.masked_share import MaskedShare
from lit_stable.run.permanent_objects import PermanentObjects
from lit_stable.run.surgery import Surgery


def spine(
    data: TokenDataModule,
    validate_every: Every,
    surgery: Surgery,
    given: Sequence[Callback],
    saves_in_background: bool = False,
) -> list[Callback]:
    """Counters, seeds, windows, the norm, saving and validating; ``given`` are those that the recipe names."""

    def names(kind: type[Callback]) -> bool:
        return any(isinstance(callback, kind) for callback in given)

    windows = AccumulationWindows(data.global_batch, data.micro_batch, data.average_over)
    return [
        Progress(),
        Events(),
        DeferredLogging(),
        StepSeed(data.seed_data),
        # A batch-size warm-up opens the windows itself.
        *([] if names(BatchSizeWarmup) else [windows]),
        # The ladder climbs on what detectors find.
        *([Detectors()] if names(Recovery) and not names(Detectors) else []),
        GradNorm(),
        *([] if data.mask_repeats is None else [MaskedShare()]),
        ValidateEverySteps(validate_every),
        SafeCheckpoints(saves_in_background),
        surgery,
        LossScaleWatch(),
        PermanentObjects(),
    ]
