"""Clip the updates of Adam or AdamW, tensor by tensor, by their root mean square."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from .adam_update import AdamUpdate, refuse_other_optimizers
from .base import MisconfigurationException, StabilityCallback, is_logging_step
from .gradient_scaler import FOUND_INF
from .optimizer_state import initialise_state
from .private_optimizer_names import after_step_first
from .shards import fsdp1_model, has_flat_parameters

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class UpdateClip(StabilityCallback):
    """Divide the learning rate of a tensor by ``RMS / threshold`` in a step where its updates are larger than that.

    ``RMS = sqrt(mean(g^2 / max(v, eps^2)))`` over the tensor, with ``v`` Adam's bias-corrected second moment of this
    very step. It is about 1 while gradients are what they have been, and it rises when ``v`` is out of date, as after a
    sudden growth of gradients: the update is then too large although each gradient may be small, and clipping gradients
    does not see it. It cannot exceed ``1 / sqrt(1 - beta2)``, 4.5 for a beta2 of 0.95 and 32 for 0.999, and is 1 in the
    first step. With AdamW this is StableAdamW (Wortsman et al. 2023, arXiv:2304.13013, algorithm 2, with the decay
    unscaled as in its authors' code); the rule is Adafactor's (Shazeer and Stern 2018, arXiv:1804.04235, section 6).

    The step is taken as ever, by the fused, the foreach or the looped kernel; what is too much of it is taken back
    right after, from the moments that it left. That reads gradients, moments and weights again, writes the weights, and
    holds two fp32 copies of at most 16M elements meanwhile (or of the largest tensor). Moments are not touched. Nothing
    waits for the device. A step in which no tensor is clipped is bit-identical to one without the callback.

    The mean is over whole tensors however they are sharded (one all-reduce of one number per tensor). A step that is
    skipped, by another callback or a gradient scaler, is neither clipped nor counted as such. A gradient that is not
    finite is no matter of this callback: ``GradSpikeSkip`` or ``GradClip`` keep it out. Gradients that these clip are
    judged as they were clipped.

    What is saved: the counts behind the metrics.

    Logged: ``stability/update_clip_frac`` (fraction of the tensors, over the steps since the last logging step, whose
    update was clipped), ``stability/update_clip_rms_max`` (the largest RMS as above of any tensor in those steps).

    Args:
        threshold: Largest RMS, > 0.
        action: ``act``, or ``log``: the same metrics, and no weight is touched.

    Raises:
        MisconfigurationException: when ``threshold`` is not a positive number, when an optimizer is neither torch's
            Adam nor its AdamW, and under an FSDP1 whose flat parameters mix tensors.

    Example::

        >>> Trainer(callbacks=[UpdateClip()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 45

    def __init__(self, threshold: float = 1.0, action: Literal["act", "log"] = "act") -> None:
        if not 0 < threshold < math.inf:
            raise MisconfigurationException(f"`UpdateClip(threshold={threshold})`: must be a finite number > 0.")
        self.threshold = threshold
        self.action = action
        self._updates: dict[int, AdamUpdate] = {}  # by the identity of the optimizer
        self._handles: list[Any] = []
        self._clipped: float | Tensor = 0.0
        self._largest: float | Tensor = 0.0
        self._seen = 0
        self._has_stepped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and has_flat_parameters(trainer):
            raise MisconfigurationException(
                "`FSDPStrategy(use_orig_params=False)`: its flat parameters hold several tensors each, which"
                " `UpdateClip` could not tell apart; set use_orig_params=True."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            refuse_other_optimizers(optimizer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()
        for optimizer in trainer.optimizers:
            initialise_state(optimizer)  # or saving before the first step would take one, with this hook
            self._updates[id(optimizer)] = AdamUpdate(optimizer, fsdp1_model(trainer))
            self._handles.append(after_step_first(optimizer, self._after_step))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        update = self._updates[id(optimizer)]
        rms = update.rms()
        found_inf = getattr(optimizer, FOUND_INF, None)  # ours, the scaler's, or both: then nothing has stepped
        if found_inf is not None:
            rms = rms.masked_fill(found_inf > 0, 0.0)
        above = rms > self.threshold
        if self.action == "act":
            update.take_back(torch.where(above, 1.0 - self.threshold / rms, 0.0))
        self._clipped = self._clipped + above.sum()
        self._largest = rms.max().clamp(min=self._largest)
        self._seen += len(update)
        self._has_stepped = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._has_stepped and is_logging_step(trainer):
            pl_module.log("stability/update_clip_frac", self._clipped / self._seen)
            pl_module.log("stability/update_clip_rms_max", self._largest)
            self._clipped, self._largest, self._seen = 0.0, 0.0, 0
        self._has_stepped = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._updates = [], {}
        self._has_stepped = False

    def state_dict(self) -> dict[str, Any]:
        return {"clipped": float(self._clipped), "largest": float(self._largest), "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clipped, self._largest = float(state_dict["clipped"]), float(state_dict["largest"])
        self._seen = int(state_dict["seen"])
