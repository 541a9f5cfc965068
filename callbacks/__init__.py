"""Drop-in Lightning callbacks that keep training runs stable and exactly resumable.

Torch and Lightning are imported with the first public name that is asked for, and with it all the others are there, so
that a ``LightningCLI`` knows every class by its bare name; in a process that has Lightning already, at once. Files that
need neither are imported without them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public_names import *

__all__ = [
    "AccumulationWindows",
    "ActivationMonitor",
    "AdaGC",
    "Alarm",
    "AttentionMonitor",
    "BatchSizeWarmup",
    "BlackBox",
    "DeferredLogging",
    "Detectors",
    "DiskSpace",
    "EffectiveLR",
    "EightBitAdam",
    "Event",
    "Events",
    "ForwardReplay",
    "GarbageCollection",
    "GracefulStop",
    "GradClip",
    "GradNorm",
    "GradSpikeSkip",
    "GradientMonitor",
    "HangWatchdog",
    "InvariantCheck",
    "InvariantViolation",
    "KillFileExists",
    "LRBackoff",
    "LROverride",
    "LateReads",
    "LayerNormFreeze",
    "OptimizerMonitor",
    "OptimizerReset",
    "OutputMonitor",
    "Progress",
    "QKClip",
    "Recovery",
    "RecoveryTime",
    "RepeatCheck",
    "ResumingBatches",
    "RunControl",
    "SafeCheckpoints",
    "SampleText",
    "Scalars",
    "ScriptedSkip",
    "SequenceLengthWarmup",
    "SourceLoss",
    "StepSeed",
    "StepTimer",
    "Throughput",
    "TokenStatistics",
    "TooManySkips",
    "UpdateClip",
    "UpdateMonitor",
    "ValidateEverySteps",
    "WeightMonitor",
    "ZClip",
    "emit",
    "fit_with_recovery",
    "global_grad_norm",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_all()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_all() -> None:
    names = import_module(f"{__name__}.public_names")
    globals().update({one: getattr(names, one) for one in __all__ if one not in globals()})


if not {"lightning.pytorch", "pytorch_lightning"}.isdisjoint(sys.modules):
    _import_all()
