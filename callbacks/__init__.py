"""Drop-in Lightning callbacks that keep training runs stable and exactly resumable."""

from .accumulation import AccumulationWindows
from .activation_monitor import ActivationMonitor
from .ada_gc import AdaGC
from .alarm import Alarm
from .attention_monitor import AttentionMonitor
from .batch_size_warmup import BatchSizeWarmup
from .black_box import BlackBox
from .deferred_logging import DeferredLogging
from .detectors import Detectors
from .disk_space import DiskSpace
from .eight_bit_adam import EightBitAdam
from .events import Event, Events, emit
from .fit_with_recovery import fit_with_recovery
from .forward_replay import ForwardReplay
from .garbage_collection import GarbageCollection
from .graceful_stop import GracefulStop
from .grad_clip import GradClip
from .grad_norm import GradNorm, global_grad_norm
from .grad_spike_skip import GradSpikeSkip
from .gradient_monitor import GradientMonitor
from .hang_watchdog import HangWatchdog
from .invariant_check import InvariantCheck, InvariantViolation
from .late_reads import LateReads
from .layer_norm_freeze import LayerNormFreeze
from .learning_rate import EffectiveLR
from .lr_backoff import LRBackoff
from .lr_override import LROverride
from .optimizer_monitor import OptimizerMonitor
from .optimizer_reset import OptimizerReset
from .output_monitor import OutputMonitor
from .progress import Progress
from .qk_clip import QKClip
from .recovery import Recovery
from .recovery_time import RecoveryTime
from .repeat_check import RepeatCheck
from .resuming_batches import ResumingBatches
from .run_control import KillFileExists, RunControl
from .safe_checkpoints import SafeCheckpoints
from .sample_text import SampleText
from .scalars import Scalars
from .scripted_skip import ScriptedSkip
from .sequence_length_warmup import SequenceLengthWarmup
from .source_loss import SourceLoss
from .spike_events import TooManySkips
from .step_seed import StepSeed
from .step_timer import StepTimer
from .step_validation import ValidateEverySteps
from .throughput import Throughput
from .token_statistics import TokenStatistics
from .update_clip import UpdateClip
from .update_monitor import UpdateMonitor
from .weight_monitor import WeightMonitor
from .z_clip import ZClip

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
