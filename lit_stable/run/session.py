"""One run on disk: its folder, its loggers, its recipe, and what a checkpoint remembers of the recipe."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lit_stable.callbacks import Events, Progress, Recovery, RunControl
from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.base import MisconfigurationException, rank_zero_only
from lit_stable.callbacks.one_beginning import refuse_beginnings_that_differ
from lit_stable.callbacks.positions import merge_ranges
from lit_stable.callbacks.safe_checkpoints import KEY
from lit_stable.callbacks.whole_file import write_whole
from lit_stable.data.another_order import another_order
from lit_stable.module import GPTModule
from lit_stable.run.alike_ranks import look_from_all_hosts, refuse_recipes_that_differ
from lit_stable.run.beginnings import beginning_of, write_beginning
from lit_stable.run.branch import (
    SCHEDULE,
    changes,
    is_another_run,
    remarkable_changes,
    run_folder_of,
    session_number,
    stored_recipes,
    write_parent,
)
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.console import say
from lit_stable.run.fingerprint import environment_changes, fingerprint
from lit_stable.run.folder import checkpoint_step, new_folder, where_to_go_on
from lit_stable.run.full_disk import on_rank_zero
from lit_stable.run.under_way import LOCK, UnderWay

_FORBIDDEN = frozenset("/\\\0")
_LONGEST = 255


@judges_arguments(ValueError, "run")
@dataclass(frozen=True)
class RunOptions:
    """Where a run lives on disk."""

    name: str | None = None
    """Name of the run; null: the name of the recipe file."""
    root: str = "runs"
    """Folder of all runs."""

    @property
    def folder(self) -> Path:
        """``root`` as a path, a leading ``~`` as the home folder: a recipe is read by no shell."""
        return Path(self.root).expanduser()

    def __post_init__(self) -> None:
        if self.name is None:
            return
        if not self.name.strip() or self.name in (".", "..") or not _FORBIDDEN.isdisjoint(self.name):
            raise ValueError(
                f"run.name={self.name!r}: is the name of one folder below run.root, so not empty, '.' or '..', and"
                " without a path separator; give another, and the folder it shall lie in as run.root."
            )
        if (size := len(os.fsencode(self.name))) > _LONGEST:
            raise ValueError(f"run.name={self.name[:20]}...: has {size} bytes, and a folder's name at most {_LONGEST}.")


class Session(Callback):
    """Opens the run's folder, when every `setup` has passed, so that a refused recipe uses up no number.

    It is the first of the application's callbacks: what others write at train start goes to its loggers.

    A new run gets the next free number. A run that goes on (``resume``) keeps its folder, with new log files beside the
    old ones, unless the recipe changes what it computes: then, and whenever a run begins at a checkpoint, it is a
    branch in a folder of its own, which says where it came from (see ``branch.py``). So nothing of a run is written
    over. The folder is held against other processes until `leave` (see ``under_way.py``).

    The resolved recipe is stored in the folder and in every checkpoint; when a checkpoint is loaded, what differs from
    it is printed, old -> new. So are versions, hardware and commits (see ``fingerprint.py``).

    Args:
        root: Folder of all runs.
        name: Name of the run.
        recipe: The resolved recipe.
        checkpoint: Where the run begins; None: at step 0.
        resumed: The folder to go on in, if any.
        own_loggers: Whether to open the run's own loggers.
        weights_alone: Whether the run takes no more than weights from the checkpoint and begins at step 0 all the same.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        recipe: dict[str, Any],
        checkpoint: Path | None,
        resumed: Path | None,
        own_loggers: bool,
        weights_alone: bool = False,
    ) -> None:
        self.root = root
        self.name = name
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.resumed = resumed
        self.folder: Path | None = None
        self._goes_on_in: Path | None = None  # held, before others are told of it
        self._made: Path | None = None  # a new folder, as long as nothing was trained in it
        self._weights_alone = weights_alone
        self._own_loggers = own_loggers
        self._under_way = UnderWay()
        self._environment: dict[str, Any] = {}
        # From the checkpoint's recipe and data.
        self._differences: list[str] = ["ckpt_part: all -> weights"] if weights_alone else []
        self.number = 1  # how often this folder was trained in, this time included

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.folder is None:  # not in a further fit, as after a rewind: files may have been changed meanwhile
            refuse_recipes_that_differ(trainer, self.recipe)
            if stage == "fit":
                look_from_all_hosts(trainer, self.resumed or self.root / self.name)
                self._hold_what_goes_on(trainer)
        refuse_beginnings_that_differ(self.checkpoint)
        found = fingerprint(self.recipe, trainer.world_size) if trainer.is_global_zero else {}
        self._environment = trainer.strategy.broadcast(found)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        problems = trainer.datamodule.model_problems(  # type: ignore[attr-defined]
            pl_module.config.vocab_size, pl_module.config.max_length
        )
        if problems:
            raise MisconfigurationException("\n".join(problems))
        facts = {**self._environment, "data": trainer.datamodule.fingerprint()}  # type: ignore[attr-defined]
        # A second fit with the same trainer goes on in the folder of the first.
        folder = self.folder or self._goes_on_in
        if folder is None:
            folder = self._made = self._new_folder(trainer)
        self._hold(trainer, folder)
        if self.folder is None:
            self._open(trainer, folder)
        self._count(trainer, facts)

    def _hold_what_goes_on(self, trainer: Trainer) -> None:
        """Hold the folder before the checkpoint is read: a run under way there deletes it, and fills the device."""
        self._goes_on_in = on_rank_zero(trainer, self.resumed or self.root, lambda: self._what_goes_on(trainer))
        if self._goes_on_in is None:
            return
        self._hold(trainer, self._goes_on_in)
        has_ladder = any(isinstance(callback, Recovery) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        there = where_to_go_on(self._goes_on_in, has_ladder) if trainer.is_global_zero else None
        went_on = there is not None and there != self.checkpoint
        if newest := trainer.strategy.broadcast(there if went_on else None):
            raise MisconfigurationException(
                f"{self.checkpoint}: is not where the run stands any more, which has gone on to {newest} in the"
                " meantime; give the command again."
            )

    def _what_goes_on(self, trainer: Trainer) -> Path | None:
        if self.resumed is None:
            return None
        data = trainer.datamodule.fingerprint()  # type: ignore[attr-defined]
        return None if is_another_run(self.resumed, self.recipe, data) else self.resumed

    def _new_folder(self, trainer: Trainer) -> Path:
        folder = self.root / self.name
        return Path(on_rank_zero(trainer, folder, lambda: str(new_folder(self.root, self.name))))

    def _hold(self, trainer: Trainer, folder: Path) -> None:
        other = on_rank_zero(trainer, folder, lambda: self._under_way.take(folder))
        if other:
            raise MisconfigurationException(
                f"{folder}: a run is under way there ({other}), and a folder has one at a time; stop that one, or begin"
                " a branch of it with --ckpt_path."
            )

    def leave(self) -> None:
        """Let others go on in the folder.

        Not at the end of a fit: when this callback has had its turn others still write, and what follows may be a
        rewind, which is another fit.
        """
        self._under_way.give_back()

    @rank_zero_only
    def remove_unused(self) -> None:
        """Give the number of a new folder back, if no step was to be taken in it. To be called after `leave`."""
        if self._made is None:
            return
        for path in (*stored_recipes(self._made), *self._made.glob("environment-[0-9]*.yaml"), self._made / LOCK):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody has written more: it stays
            self._made.rmdir()

    def _open(self, trainer: Trainer, folder: Path) -> None:
        # Not before it is held: who is told of a folder writes into it, his last words of a refusal too.
        self.folder = Events.of(trainer).folder = folder
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            placed = isinstance(callback, Recovery) and callback.folder is not None
            if isinstance(callback, (Checkpoints, Recovery, RunControl)) and not placed:
                callback.folder = folder

    def _count(self, trainer: Trainer, facts: dict[str, Any]) -> None:
        """Each fit has log files of its own: what one has logged before a rewind must not be written over."""
        assert self.folder is not None
        folder = self.folder

        def write() -> int:
            number = 1 + max(map(session_number, stored_recipes(folder)), default=0)
            # The recipe last: it is what makes a session count, for the next one and for `runs`.
            for kind, content in (("environment", facts), ("recipe", self.recipe)):
                write_whole(folder / f"{kind}-{number:02d}.yaml", yaml.safe_dump(content, sort_keys=False))
            return number

        self.number = on_rank_zero(trainer, folder, write)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.folder is not None
        self._made = None
        folder, beginning = self.folder, beginning_of(trainer, self.number)
        on_rank_zero(trainer, folder, lambda: write_beginning(folder, beginning))
        began, self.checkpoint = self.checkpoint, None  # another fit, after a rewind, begins within this run
        if began is not None and folder != self.resumed:
            # Not before: the step and the recipe are the checkpoint's own, and strategies load it at different times.
            step = checkpoint_step(began) or 0 if self._weights_alone else Progress.of(trainer).steps
            on_rank_zero(trainer, folder, lambda: write_parent(folder, began, step, self._differences))
            part = ", of its weights alone: the optimizer is new" if self._weights_alone else ""
            say(f"a branch of {run_folder_of(began) or began} at step {step}{part}")
        if self._own_loggers:  # not before: where the run stands is known only now
            trainer.loggers = self._loggers(self.folder, Progress.of(trainer).steps)

    def _loggers(self, folder: Path, steps: int) -> list[Logger]:
        # What a killed process logged after the checkpoint is logged again: TensorBoard drops the older points.
        purge_step = steps + 1 if steps else None
        return [
            TensorBoardLogger(save_dir=folder, name="", version="tensorboard", purge_step=purge_step),
            CSVLogger(save_dir=folder, name="", version=f"csv-{self.number:02d}"),
        ]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        checkpoint.setdefault(KEY, {}).update(
            recipe=self.recipe, data=data.fingerprint(), environment=self._environment
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        stored = checkpoint.get(KEY, {})
        for line in environment_changes(stored["environment"], self._environment) if "environment" in stored else ():
            say(f"environment changed since the checkpoint: {line}")
        if "recipe" not in stored or trainer.state.fn != "fit":
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        other_data = changes(stored["data"], data.fingerprint())
        self._differences = remarkable_changes(stored["recipe"], self.recipe) + other_data
        for line in self._differences:
            if not line.startswith(SCHEDULE):  # the module tells of it
                say(f"changed since the checkpoint: {line}")
        place = checkpoint.get("callbacks", {}).get(Progress.of(trainer).state_key)
        if place is not None and not self._weights_alone:
            told = another_order(self._differences, place["samples"], merge_ranges(place["dropped"]))
            if told is not None:
                say(told)
