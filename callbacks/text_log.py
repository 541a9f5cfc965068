"""Text to every logger that takes it; Lightning's own interface knows numbers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@rank_zero_only
def log_text(trainer: Trainer, key: str, text: str, step: int) -> None:
    """Hand a text to the trainer's loggers, on rank 0.

    TensorBoard, Weights & Biases, MLflow and Comet take it, and any logger of one's own that has a method
    ``log_text(key, text, step)``; others (CSV) are passed over. A logger that fails is warned of, and the run goes on.

    Args:
        trainer: Whose loggers.
        key: As for a metric, such as ``samples/0``.
        text: May span lines.
        step: Optimizer step to put it at.
    """
    for logger in trainer.loggers:
        try:
            _write(logger, key, text, step)
        except Exception as error:  # a full disk or a lost connection must not end a run
            rank_zero_warn(f"{type(logger).__name__}: could not take the text {key!r} of step {step}: {error!r}")


def _write(logger: Any, key: str, text: str, step: int) -> None:
    # By name, not by class: the two Lightning namespaces have a class each, and all of these are optional packages.
    kinds = {cls.__name__ for cls in type(logger).__mro__}
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_text(key, text, step)
    elif "WandbLogger" in kinds:
        logger.log_text(key, columns=["step", "text"], data=[[str(step), text]])
    elif "MLFlowLogger" in kinds:
        logger.experiment.log_text(logger.run_id, text, f"{key}/{step:08d}.txt")
    elif "CometLogger" in kinds:
        logger.experiment.log_text(text, step=step, metadata={"key": key})
    elif hasattr(logger, "log_text"):
        logger.log_text(key, text, step)
