"""What fp16 adds to a run: the loss scale in the log, skipped steps in the counters, an end at the floor."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer

from lit_stable.callbacks import GradNorm, Progress
from lit_stable.callbacks.base import MisconfigurationException, StabilityCallback, is_logging_step, rank_zero_info
from lit_stable.callbacks.device_step import clear_all, hook_steps, skip_step
from lit_stable.callbacks.private_optimizer_names import loss_scale
from lit_stable.strategies.loss_scale import LossScaler

#: Under which names Lightning stores what a precision plugin saves, by the strategy that ran.
_PLUGINS = ("MixedPrecision", "FSDPPrecision", "FSDP2Precision")


class LossScaleWatch(StabilityCallback):
    """Watch the loss scale of a run in fp16; does nothing where there is none.

    A step that the scaler skips is counted in ``Progress.skipped``, also where no callback judges the norm. At logging
    steps, the only ones at which the device is read, a run whose gradients overflowed at the lowest scale ends.

    A checkpoint of a run with a loss scale goes on without one and the other way round, and under another strategy; one
    line says what becomes of the scale.

    Logged at logging steps: ``loss_scale``, the factor of the step.

    Raises:
        MisconfigurationException: at the first logging step after an overflow at the floor.
    """

    order: ClassVar[int] = 42  # after those that judge the norm, whose skips are not counted twice

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and _scaler(trainer) is not None:
            GradNorm.of(trainer)
            Progress.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _scaler(trainer) is not None:
            self._hooks = [hook_steps(trainer, optimizer) for optimizer in trainer.optimizers]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._hooks:
            clear_all(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        scaler = _scaler(trainer)
        if scaler is None:
            return
        norm = GradNorm.of(trainer).value
        assert norm is not None
        skip_step(trainer, optimizer, ~norm.isfinite())
        if not is_logging_step(trainer):
            return
        scale = loss_scale(trainer)
        if scale is not None:
            pl_module.log("loss_scale", scale)
        if isinstance(scaler, LossScaler) and scaler.exhausted is not None and bool(scaler.exhausted):
            raise MisconfigurationException(
                f"step {Progress.of(trainer).steps}: gradients overflowed at loss_scale.floor={scaler.policy.floor:g},"
                " so no scale keeps them finite; go on from an earlier checkpoint with a lower learning rate or"
                " stability.grad_spike_skip, or switch: --trainer.precision bf16-mixed."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            clear_all(trainer)
        self._hooks = []

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        saved = next((checkpoint[name] for name in _PLUGINS if checkpoint.get(name)), None)
        precision, scaler = trainer.precision, _scaler(trainer)
        if saved is None and scaler is not None:
            rank_zero_info(f"loss scale: the checkpoint has none; begins at {scaler.get_scale():g} ({precision})")
        elif saved is not None and scaler is None:
            rank_zero_info(f"loss scale: {saved['scale']:g} of the checkpoint dropped; {precision} needs none")
        elif saved is not None:
            # Where Lightning looks for it: another strategy saved it under another name.
            checkpoint[type(trainer.precision_plugin).__qualname__] = saved


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)
