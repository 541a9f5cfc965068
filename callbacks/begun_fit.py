"""What must hold where a fit begins or goes on, and what is said otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import MisconfigurationException, StabilityCallback, rank_zero_warn
from .private_names import begin_epoch_anew_if_full, replay_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def refuse_counters_that_came_too_late(trainer: Trainer) -> None:
    """Raise where counters that stand at 0 meet a run that has begun."""
    if trainer.global_step:
        raise MisconfigurationException(
            f"`Progress` begins at 0 and the trainer stands at step {trainer.global_step} already: it was installed"
            " too late to be restored; put `Progress()` into the trainer's callbacks."
        )


def batches_taken_elsewhere(module: LightningModule) -> MisconfigurationException:
    """What is said to a ``training_step`` that fetches its own batches."""
    return MisconfigurationException(
        f"`{type(module).__name__}.training_step(dataloader_iter)`: takes its batches itself, so none can be counted"
        " before it is trained on; take (batch, batch_idx)."
    )


def refuse_state_of_another_run(trainer: Trainer) -> None:
    """Raise when a new run begins with callbacks that carry what they learned with another trainer."""
    ours = [c for c in trainer.callbacks if isinstance(c, StabilityCallback)]  # type: ignore[attr-defined]
    for callback in ours:
        elsewhere = callback.served is not None and callback.served is not trainer.state
        if elsewhere and not trainer.global_step and callback.state_dict():
            name = type(callback).__name__
            raise MisconfigurationException(
                f"`{name}`: has trained with another trainer and would begin with what it learned there; give each"
                f" trainer its own `{name}(...)`."
            )
        callback.served = trainer.state


def tell_of_a_loader_that_begins_anew(trainer: Trainer, samples: int) -> None:
    """Warn where a resumed run would read its stream from the start; of loaders with a length Lightning itself does."""
    loader = trainer.train_dataloader
    if trainer.num_training_batches == float("inf") and not hasattr(loader, "load_state_dict"):
        rank_zero_warn(
            f"Progress: {samples:,} samples were consumed before this resume, and the training loader, which has no"
            " length, was made without asking for the position: unless it finds its place by itself it repeats them;"
            " let `train_dataloader` begin at sample `Progress.of(self.trainer).position`."
        )


def mend_place_in_epoch(trainer: Trainer, batches: int) -> None:
    """Let a fit go on in its epoch where Lightning's count of batches would have it go on elsewhere.

    A checkpoint written within an accumulation window, after so many ``batches``: the window is replayed. One written
    when a fit had ended with an epoch: the next begins.
    """
    if batches and hasattr(trainer.train_dataloader, "load_state_dict"):
        rank_zero_warn(
            f"Progress: the checkpoint was written within an accumulation window, and the training loader, which has a"
            f" state of its own, goes on behind the {batches:,} micro-batches begun by then: they are not trained on;"
            " save at the end of a step, or let `train_dataloader` begin at sample"
            " `Progress.of(self.trainer).position`, with no state."
        )
    elif batches:
        replay_window(trainer, batches)
    begin_epoch_anew_if_full(trainer)
