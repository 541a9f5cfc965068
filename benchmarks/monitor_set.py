"""The monitors that `recipes/stability/monitors.yaml` turns on, for whoever measures what they cost."""

from __future__ import annotations

from lightning.pytorch import Callback

from lit_stable.callbacks import (
    ActivationMonitor,
    AttentionMonitor,
    DiskSpace,
    GarbageCollection,
    GradientMonitor,
    HangWatchdog,
    InvariantCheck,
    OptimizerMonitor,
    OutputMonitor,
    RecoveryTime,
    SourceLoss,
    StepTimer,
    Throughput,
    TokenStatistics,
    UpdateMonitor,
    WeightMonitor,
)


def default_monitors(sources: list[str] | None = None) -> list[Callback]:
    """New instances with the intervals of the recipe; ``sources``: names, where the data module has none."""
    return [
        WeightMonitor(),
        GradientMonitor(),
        UpdateMonitor(),
        OptimizerMonitor(),
        ActivationMonitor(every_steps=20),
        AttentionMonitor(every_steps=20),
        OutputMonitor(every_steps=20),
        SourceLoss(names=sources),
        TokenStatistics(),
        RecoveryTime(),
        Throughput(),
        StepTimer(),
        GarbageCollection(every_steps=200),
        HangWatchdog(seconds=1800),
        DiskSpace(every_steps=100, min_free_gib=20),
        InvariantCheck(every_steps=500),
    ]
