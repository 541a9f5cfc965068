"""Averages of the weights that stand still on a skipped step. Not imported with the package: it needs Lightning 2.6."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_avg_fn

from .argument_types import judges_arguments
from .progress import Progress

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # a project that has the stand-alone packages only, or a Lightning before 2.6
    from lightning_fabric.utilities.exceptions import MisconfigurationException  # type: ignore[assignment]
    from pytorch_lightning.callbacks import WeightAveraging  # type: ignore[assignment]

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
else:
    # For a LightningCLI of the other namespace, as in base.py.
    _other = getattr(sys.modules.get("pytorch_lightning"), "Callback", object)
    if not issubclass(WeightAveraging, _other):
        WeightAveraging = type("_WeightAveraging", (WeightAveraging, _other), {"__module__": __name__})


class HoldOnSkip:
    """Put before ``WeightAveraging`` in a class's bases: no update of the average after a step that was skipped.

    Such a step left the weights as they were, and to average them in once more would move the average all the same.
    ``Progress`` knows of every one: condemned by a callback, left out by a gradient scaler, withheld by the module.
    Whether to update at all is still up to ``should_update``. It is asked on the host once per optimizer step: torch's
    ``AveragedModel`` waits for the device there anyway.
    """

    _asked_at = -1  # optimizer steps taken when it was last asked; micro-batches of the next window ask no more
    _held = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            Progress.of(trainer)
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step != self._asked_at:
            self._asked_at = trainer.global_step
            self._held = Progress.of(trainer).skipped_last
        if not self._held:
            super().on_train_batch_end(trainer, *args, **kwargs)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        # Or the rest of a window that is resumed behind a skipped step would make up for it.
        return {**super().state_dict(), "held_at": self._asked_at if self._held else -1}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._asked_at = int(state_dict.get("held_at", -1))
        self._held = self._asked_at >= 0


class _Averaging(WeightAveraging):
    """Lightning's own, in a trainer of either namespace, and saved as what it is within a validation too."""

    _has_average = _is_swapped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's knows modules by the classes of its own namespace alone.
        self._has_average, self._is_swapped = self._has_average or stage == "fit", False
        origin = next(cls.__module__ for cls in type(pl_module).__mro__ if cls.__name__ == "LightningModule")
        names = {"lightning": "lightning.pytorch.callbacks", "pytorch_lightning": "pytorch_lightning.callbacks"}
        theirs = importlib.import_module(names[origin.split(".")[0]]).WeightAveraging
        theirs.setup(self, trainer, pl_module, stage)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._is_swapped = self._has_average

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self._is_swapped = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._is_swapped:  # for a validation, in which each stands in the other's place
            average = checkpoint["current_model_state"]
            checkpoint["current_model_state"], checkpoint["state_dict"] = checkpoint["state_dict"], average


@judges_arguments(MisconfigurationException)
class SkipAwareEMA(HoldOnSkip, _Averaging):
    """Exponential moving average of the weights that does not move on a step that was skipped, by whomever.

    Otherwise Lightning's ``WeightAveraging``: the average is used for validation and at the end, and is saved. An
    average of another kind holds in the same way: ``class Mine(HoldOnSkip, WeightAveraging)``. Nothing is logged.

    Args:
        decay: Share of the average that stays at each step, in [0, 1).
        device: Where the average lives; ``None``: with the model.
        use_buffers: Whether buffers are averaged too.

    Raises:
        MisconfigurationException: when ``decay`` is outside its range, or ``device`` is none.

    Example::

        >>> from lit_stable.callbacks.skip_aware_ema import SkipAwareEMA  # doctest: +SKIP
        >>> Trainer(callbacks=[GradSpikeSkip(), SkipAwareEMA(0.999)])  # doctest: +SKIP
    """

    def __init__(self, decay: float = 0.999, device: str | None = None, use_buffers: bool = True) -> None:
        if not 0 <= decay < 1:
            raise MisconfigurationException(f"`SkipAwareEMA(decay={decay})`: must lie in [0, 1).")
        self.decay = decay
        try:
            found = None if device is None else torch.device(device)
        except RuntimeError:
            raise MisconfigurationException(
                f"`SkipAwareEMA(device={device!r})`: must be a device of torch, as cpu or cuda:0."
            ) from None
        super().__init__(
            device=found,
            use_buffers=use_buffers,
            avg_fn=get_ema_avg_fn(decay),  # type: ignore[no-untyped-call]
        )
