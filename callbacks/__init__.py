"""Drop-in Lightning callbacks that keep training runs stable and exactly resumable."""

from .accumulation import AccumulationWindows
from .batch_size_warmup import BatchSizeWarmup
from .graceful_stop import GracefulStop
from .grad_clip import GradClip
from .grad_norm import GradNorm, global_grad_norm
from .grad_spike_skip import GradSpikeSkip
from .layer_norm_freeze import LayerNormFreeze
from .learning_rate import EffectiveLR
from .lr_override import LROverride
from .optimizer_reset import OptimizerReset
from .progress import Progress
from .safe_checkpoints import SafeCheckpoints
from .sequence_length_warmup import SequenceLengthWarmup
from .step_seed import StepSeed
from .step_validation import ValidateEverySteps
from .update_clip import UpdateClip

__all__ = [
    "AccumulationWindows",
    "BatchSizeWarmup",
    "EffectiveLR",
    "GracefulStop",
    "GradClip",
    "GradNorm",
    "GradSpikeSkip",
    "LROverride",
    "LayerNormFreeze",
    "OptimizerReset",
    "Progress",
    "SafeCheckpoints",
    "SequenceLengthWarmup",
    "StepSeed",
    "UpdateClip",
    "ValidateEverySteps",
    "global_grad_norm",
]
