"""Drop-in Lightning callbacks that keep training runs stable and exactly resumable."""

from .accumulation import AccumulationWindows
from .graceful_stop import GracefulStop
from .grad_clip import GradClip
from .grad_norm import GradNorm, global_grad_norm
from .progress import Progress
from .safe_checkpoints import SafeCheckpoints
from .step_seed import StepSeed
from .step_validation import ValidateEverySteps

__all__ = [
    "AccumulationWindows",
    "GracefulStop",
    "GradClip",
    "GradNorm",
    "Progress",
    "SafeCheckpoints",
    "StepSeed",
    "ValidateEverySteps",
    "global_grad_norm",
]
