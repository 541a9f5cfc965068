"""When to save and what to keep."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_stable.callbacks import Progress, SafeCheckpoints
from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.base import MisconfigurationException, refuse_all
from lit_stable.callbacks.cadence import Every, parse_cadence
from lit_stable.callbacks.checkpoint_files import remove, size_on_disk
from lit_stable.run.checkpoint_notes import CheckpointNotes
from lit_stable.run.console import human_bytes, say
from lit_stable.run.folder import CHECKPOINTS, checkpoint_path, checkpoint_step, checkpoints
from lit_stable.run.milestones import Milestone, milestones
from lit_stable.run.mirror import Mirror, mirror_of
from lit_stable.validation_losses import TOTAL


@judges_arguments(MisconfigurationException, "checkpoints")
class Checkpoints(Checkpoint):
    """Save at step boundaries into the run's folder; keep the last, the best, and what is worth going back to for ever.

    Saved: at ``first_step``, so that something is there early; every ``every_steps``, in samples or tokens at the end
    of the step that comes to a multiple or over it; every ``keep_every``; at milestones; after the last step, whatever
    ends the fit but an error; on a better validation loss; when the run is told to stop. The name carries the step, so
    no save replaces another.

    **Milestones** are the end of the warm-up, the end of each stage of a batch-size ramp, and the last step before
    anything that overrides the run begins: a callback with a ``start``, or a learning rate that is changed by an order
    (``lit-stable ctl``). They stay for ever; ``checkpoints/milestones.json`` says what each is.

    **The mirror** gets a copy of every checkpoint, below ``MIRROR/NAME/NUMBER``, made in the background and read again
    to compare checksums. With it nothing is deleted here before its copy was found right. See ``mirror.py``.

    Args:
        every_steps: Optimizer steps between saves, >= 1; or text with a unit, as ``500M tokens`` or ``100k samples``.
        first_step: An early save, >= 1; ``None``: none.
        keep_last: How many of the newest stay, >= 1.
        keep_best: Whether the one with the lowest ``val/loss`` stays as well.
        keep_every: Steps between checkpoints that stay for ever, >= 1; ``None``: none does for its number.
        milestones: Whether milestones are saved, and stay.
        mirror: A path, or a URL that ``fsspec`` opens; ``None``: no copies.
        in_background: Write from a copy in the host's memory while training goes on; see ``SafeCheckpoints``.

    Raises:
        MisconfigurationException: when a number cannot be read or is below 1, or the URL cannot be opened.
    """

    def __init__(
        self,
        every_steps: Every = 500,
        first_step: int | None = 10,
        keep_last: int = 1,
        keep_best: bool = True,
        keep_every: int | None = None,
        milestones: bool = False,
        mirror: str | None = None,
        in_background: bool = False,
    ) -> None:
        problems = []
        try:
            self.every = parse_cadence(every_steps)
        except ValueError as error:
            problems.append(f"checkpoints.every_steps={every_steps}: {error}")
        problems += [
            f"checkpoints.{name}={value}: must be at least 1."
            for name, value in (("first_step", first_step), ("keep_last", keep_last), ("keep_every", keep_every))
            if value is not None and value < 1
        ]
        refuse_all(problems)
        self.first_step = first_step
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every = keep_every
        self.milestones = milestones
        self.mirror = mirror
        self.in_background = in_background
        self.stalls: list[float] = []  # seconds that each save has held up training
        self.folder: Path | None = None  # the run's, set before training starts
        self.best_loss = math.inf
        self.best_step: int | None = None
        self._noted: tuple[int, float] | None = None  # step and loss of the best whose checkpoint is on disk
        self._began = self._seen = 0  # optimizer steps when the fit began, and when there was last one more
        self._ahead: list[Milestone] = []
        self._kept: dict[int, str] = {}  # milestones that were saved, by step
        self._notes: CheckpointNotes | None = None
        self._mirror: Mirror | None = None
        self._saver: SafeCheckpoints | None = None
        self._saving: Path | None = None  # not told of yet: it may be written in the background

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._seen = Progress.of(trainer).steps
        self._saver = next((c for c in trainer.callbacks if isinstance(c, SafeCheckpoints)), None)  # type: ignore[attr-defined]
        self._saving = None
        assert self.folder is not None
        self._notes = CheckpointNotes(self.folder / CHECKPOINTS)
        self._read_best(trainer)
        if self.milestones:
            self._ahead = milestones(getattr(pl_module, "schedule", None), trainer.callbacks)  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            self._begin_on_disk()

    def _begin_on_disk(self) -> None:
        assert self.folder is not None
        assert self._notes is not None
        there = (checkpoint_step(path) or 0 for path in checkpoints(self.folder))
        self._kept = self._notes.spare(self._notes.read_milestones(), there)
        self._mirror = mirror_of(self.mirror, self.folder, self.folder / CHECKPOINTS)
        if self._mirror is not None:
            for path in checkpoints(self.folder):
                self._mirror.add(path)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._conclude(trainer)
        if Progress.of(trainer).steps == self._seen:  # in mid-window
            return
        progress = Progress.of(trainer)
        self._seen = step = progress.steps
        reached = [m.label for m in self._ahead if m.is_reached(progress.start, progress.mark)]
        if reached:
            self.keep_now(trainer, ", ".join(reached))
        forever = self.keep_every is not None and step % self.keep_every == 0
        due = self.every.is_due(progress.start, progress.mark)
        if forever or due or step in (self.first_step, trainer.max_steps):
            self.save_now(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # In this hook, whoever has ended the fit: behind it others leave weights that are not those of training, as an
        # average of them. A step of which micro-batches are left over has its window replayed, as after any save.
        if trainer.fit_loop.done and Progress.of(trainer).steps != self._began:
            self.save_now(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finish(trainer)
        if self._mirror is not None:
            self._mirror.close()
            self._prune_while_finite(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # By now `SafeCheckpoints` has waited for it, or told of its failure. Nothing is deleted: the next fit knows
        # what it needs, and the loss may lie on a device that is gone.
        path, self._saving = self._saving, None
        if path is not None and path.exists():
            self._tell(trainer, path)

    def keep_now(self, trainer: Trainer, label: str) -> None:
        """Save this step, if milestones are kept, and let it stay for ever. Called by all ranks."""
        if not self.milestones:
            return
        self._kept[Progress.of(trainer).steps] = label
        if trainer.is_global_zero:  # before the save: one that was saved and not noted would be deleted
            assert self._notes is not None
            self._notes.write_milestones(self._kept)
        self.save_now(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        loss = float(trainer.callback_metrics.get(TOTAL, math.nan))  # reduced: the same on all ranks
        if not loss < self.best_loss:  # a NaN is never better
            return
        self.best_loss, self.best_step = loss, Progress.of(trainer).steps
        if self.keep_best:
            self.save_now(trainer)
        self._note_best(trainer)

    def save_now(self, trainer: Trainer) -> None:
        """Save this step, if it is not saved yet, and delete what need not be kept. Called by all ranks."""
        assert self.folder is not None
        path = checkpoint_path(self.folder, Progress.of(trainer).steps)
        if not trainer.strategy.broadcast(path.exists() or path == self._saving):
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize(trainer.strategy.root_device)  # a save waits for the device; that is no stall
            began = time.perf_counter()
            self.finish(trainer)
            trainer.save_checkpoint(path)
            self.stalls.append(time.perf_counter() - began)
            self._saving = path
        if self._saving is None:  # it was there already; but another may be the best by now
            self._follow_up(trainer, path)
            self._prune_while_finite(trainer)
        self._conclude(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Wait for a save that is under way, and do what follows it. Called by all ranks."""
        if self._saver is not None:
            self._saver.finish()
        self._conclude(trainer)

    def _conclude(self, trainer: Trainer) -> None:
        """What follows a save, once it is on disk."""
        if self._saving is None or (self._saver is not None and self._saver.is_writing):
            return
        if self._saver is not None:
            self._saver.finish()  # raises what went wrong
        path, self._saving = self._saving, None
        self._tell(trainer, path)
        self._prune_while_finite(trainer)

    def _tell(self, trainer: Trainer, path: Path) -> None:
        if trainer.is_global_zero:
            stood = f"training stood still for {self.stalls[-1]:.2f} s"
            say(f"saved {path} ({human_bytes(size_on_disk(path))}, {stood})")
        self._follow_up(trainer, path)

    def _follow_up(self, trainer: Trainer, path: Path) -> None:
        self._note_best(trainer)
        if self._mirror is not None:
            self._mirror.add(path)

    def _prune_while_finite(self, trainer: Trainer) -> None:
        loss = getattr(trainer.lightning_module, "window_loss", None)
        # From a loss that is not finite nothing is learned any more: what was saved before it stays.
        if trainer.is_global_zero and (loss is None or math.isfinite(float(loss))):
            self._prune(trainer)

    def _prune(self, trainer: Trainer) -> None:
        assert self.folder is not None
        found = checkpoints(self.folder)
        kept = set(found[-self.keep_last :])
        if self.keep_best:  # the old one too, until the new one is there
            best = [self.best_step, self._noted and self._noted[0]]
            kept |= {checkpoint_path(self.folder, step) for step in best if step is not None}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "checkpoints_to_keep"):
                kept |= callback.checkpoints_to_keep()
        kept |= {path for path in found if self._stays(checkpoint_step(path) or 0)}
        for path in found:
            if path not in kept and (self._mirror is None or self._mirror.is_verified(path)):
                remove(path)

    def _stays(self, step: int) -> bool:
        return step in self._kept or (self.keep_every is not None and step % self.keep_every == 0)

    def last(self) -> Path | None:
        """The newest checkpoint of the run."""
        found = checkpoints(self.folder) if self.folder is not None else []
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss, if it was kept."""
        found = checkpoints(self.folder) if self.folder is not None else []
        return next((p for p in found if checkpoint_step(p) == self.best_step), None)

    def _note_best(self, trainer: Trainer) -> None:
        """Write down which is best once it is on disk; a kill before that leaves the older best, and its name."""
        assert self.folder is not None
        assert self._notes is not None
        if not trainer.is_global_zero:
            return
        if self.best_step is None or self._noted == (best := (self.best_step, self.best_loss)):
            return
        if not self.keep_best or checkpoint_path(self.folder, self.best_step).exists():
            self._noted = best
            self._notes.write_best(*best)

    def _read_best(self, trainer: Trainer) -> None:
        assert self._notes is not None
        self.best_loss, self.best_step, self._noted = math.inf, None, None
        best = trainer.strategy.broadcast(self._notes.read_best() if trainer.is_global_zero else None)
        # What is still to come will be measured again, and may come out otherwise after a rewind.
        if best is not None and best[0] <= Progress.of(trainer).steps:
            self._noted = self.best_step, self.best_loss = best
