"""`stability:`: one named, typed, optional argument per feature, so that recipes merge them by name."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, Optional, get_args, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser

from lit_stable.callbacks import (
    ActivationMonitor,
    Alarm,
    AttentionMonitor,
    BatchSizeWarmup,
    BlackBox,
    Detectors,
    DiskSpace,
    EightBitAdam,
    GarbageCollection,
    GradClip,
    GradientMonitor,
    GradSpikeSkip,
    HangWatchdog,
    InvariantCheck,
    LayerNormFreeze,
    LRBackoff,
    LROverride,
    OptimizerMonitor,
    OptimizerReset,
    OutputMonitor,
    QKClip,
    Recovery,
    RecoveryTime,
    RepeatCheck,
    SampleText,
    ScriptedSkip,
    SequenceLengthWarmup,
    SourceLoss,
    StepTimer,
    Throughput,
    TokenStatistics,
    UpdateClip,
    UpdateMonitor,
    WeightMonitor,
)
from lit_stable.callbacks.base import MisconfigurationException

#: Features by their name in a recipe. `name: {option: value}` turns one on, `name: null` off.
FEATURES: dict[str, type[Callback]] = {
    "activation_monitor": ActivationMonitor,
    "alarm": Alarm,
    "attention_monitor": AttentionMonitor,
    "batch_size_warmup": BatchSizeWarmup,
    "black_box": BlackBox,
    "detectors": Detectors,
    "disk_space": DiskSpace,
    "garbage_collection": GarbageCollection,
    "eight_bit_adam": EightBitAdam,
    "grad_clip": GradClip,
    "grad_spike_skip": GradSpikeSkip,
    "gradient_monitor": GradientMonitor,
    "hang_watchdog": HangWatchdog,
    "invariant_check": InvariantCheck,
    "layer_norm_freeze": LayerNormFreeze,
    "lr_backoff": LRBackoff,
    "lr_override": LROverride,
    "optimizer_monitor": OptimizerMonitor,
    "optimizer_reset": OptimizerReset,
    "output_monitor": OutputMonitor,
    "qk_clip": QKClip,
    "recovery": Recovery,
    "recovery_time": RecoveryTime,
    "repeat_check": RepeatCheck,
    "sample_text": SampleText,
    "scripted_skip": ScriptedSkip,
    "sequence_length_warmup": SequenceLengthWarmup,
    "source_loss": SourceLoss,
    "step_timer": StepTimer,
    "throughput": Throughput,
    "token_statistics": TokenStatistics,
    "update_clip": UpdateClip,
    "update_monitor": UpdateMonitor,
    "weight_monitor": WeightMonitor,
}


def add_feature_arguments(parser: LightningArgumentParser) -> None:
    """Add ``--stability.NAME`` for every feature, and ``--stability.extra`` for any other callback by a free name."""
    for name, feature in FEATURES.items():
        parser.add_argument(f"--stability.{name}", type=Optional[feature], default=None)  # noqa: UP045 - a runtime type
    parser.add_argument("--stability.extra", type=dict[str, Optional[Callback]], default={})  # noqa: UP045


def nested_options(feature: type[Callback]) -> dict[str, type[Any]]:
    """The dataclass of each of a feature's options that has options of its own, by name."""
    kinds = {
        name: next((kind for kind in get_args(hint) if is_dataclass(kind)), None)
        for name, hint in get_type_hints(feature.__init__).items()
    }
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type)}


def active_features(stability: Namespace) -> dict[str, Callback]:
    """The features that are on, by name, those under ``extra`` as ``extra.NAME``."""
    values: dict[str, Any] = {**vars(stability)}
    extra = values.pop("extra", None) or {}
    values.update({f"extra.{name}": callback for name, callback in extra.items()})
    return {name: callback for name, callback in values.items() if callback is not None}


def refuse_twins(callbacks: list[Callback], features: dict[str, Callback]) -> None:
    """Raise when a class stands both in ``trainer.callbacks`` and under ``stability``: it would act twice."""
    for name, feature in features.items():
        if any(type(callback) is type(feature) for callback in callbacks):
            raise MisconfigurationException(
                f"{type(feature).__name__}: stands in trainer.callbacks and as stability.{name}, and would act twice;"
                " keep one of them."
            )


def adopt_data(features: dict[str, Callback], data: Any) -> None:
    """Hand the data's sizes to the features that take them, by ``adopt``: a recipe states each size once."""
    for feature in features.values():
        if hasattr(feature, "adopt"):
            feature.adopt(data)
