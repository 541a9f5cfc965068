"""Steer a run from outside: save, stop, validate, change the learning rate; on all ranks at one step boundary."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .base import (
    MisconfigurationException,
    StabilityCallback,
    is_logging_step,
    log_number,
    rank_zero_info,
    rank_zero_warn,
)
from .control_orders import Done, Order, now, read_ledger, waiting, write_ledger
from .early_end import EarlyEnd, save_now
from .events import Event, Events, emit
from .host_agreement import HostAgreement
from .learning_rate import EffectiveLR
from .private_names import after_batch_end, forget_batch_end, validate_by_clock, window_is_open
from .progress import Mark, Progress
from .safe_checkpoints import KEY

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class KillFileExists(MisconfigurationException):
    """Raised on all ranks before training, while the kill file is there."""


class RunControl(StabilityCallback):
    """Take orders to a run under way, which somebody puts into ``folder/control`` (``lit-stable ctl RUN ORDER`` does).

    ``save``: a checkpoint now. ``validate``: a validation now. ``stop``: a checkpoint and the end of the fit, as
    :class:`~.graceful_stop.GracefulStop` does it. ``lr*=0.67``: the learning rate times that, on top of the schedule
    and of every other change, for the rest of the run.

    Rank 0 looks for orders after every ``every_steps``-th optimizer step; all ranks carry them out together at that
    step boundary, behind every ``on_train_batch_end``, in the order in which they were asked. Each is first written, to
    disk, as a line of ``folder/control.jsonl``, and an event ``control`` says it to the loggers. Without that line (a
    full disk) only a stop is carried out; the others wait.

    **The learning rate is in force after a resume**, from the very step on: from the checkpoint, or, where that is
    older than the order, from the ledger when the run comes to the step again. A run that branches off from an earlier
    checkpoint into another folder does not know of what came later. ``lr*=1.5`` takes back ``lr*=0.666...`` as far as
    the numbers do; both stay in the record.

    **The kill file**, ``folder/STOP`` unless named otherwise, acts as ``stop`` does, and for as long as it is there no
    fit begins: ``KillFileExists``. One file may stop many runs.

    Between orders a step costs a look into a folder on rank 0 and, with several ranks, one all-reduce of one number
    over a CPU group; the device is never read. Without an order the run is bit-identical to one without this callback,
    and its log has the same keys.

    Logged at logging steps, once the learning rate was changed: ``stability/control_lr_factor`` (product of the factors
    in force), and what ``EffectiveLR`` logs.

    Args:
        kill_file: Path of the kill file, relative to ``folder``; ``None``: there is none.
        every_steps: Optimizer steps between looks, >= 1.
        folder: Of the run; ``None``: the trainer's ``default_root_dir``.

    Attributes:
        stopped: Whether an order or the kill file has stopped the last fit.
        is_replay: Take no orders and write nothing; what the ledger in ``folder`` says of the learning rate holds.

    Raises:
        MisconfigurationException: when ``every_steps`` is below 1.
        KillFileExists: see above.

    Example::

        >>> Trainer(callbacks=[RunControl(folder="runs/mine")], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 94  # before GracefulStop: what both save is one checkpoint

    def __init__(self, kill_file: str | None = "STOP", every_steps: int = 1, folder: str | None = None) -> None:
        if every_steps < 1:
            raise MisconfigurationException(f"`RunControl(every_steps={every_steps})`: must be at least 1.")
        self.kill_file, self.every_steps = kill_file, every_steps
        self.folder = None if folder is None else Path(folder)
        self.stopped = False
        self.is_replay = False
        self._changes: dict[str, tuple[int, float]] = {}  # by order: steps behind the run, factor
        self._run = ""
        self._steps = 0
        self._is_within_hooks = False  # of the end of a batch, behind which what was ordered in its step is in force
        self._end = EarlyEnd()
        self._ranks = HostAgreement()
        self._trainers_own: tuple[Any, int | None] | None = None  # when it validates, while one is asked for
        self._warned = False

    # -- begin -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        Events.of(trainer)
        Progress.of(trainer)
        self._ranks.open(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stopped = False
        kill_file = self._kill_file(trainer)
        exists = kill_file is not None and not self.is_replay and kill_file.exists()
        if trainer.strategy.broadcast(exists):
            raise KillFileExists(f"{kill_file}: exists, and while it does nothing is trained; delete it to go on.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = Progress.of(trainer).steps
        if not self._steps or not self._run:  # what a folder holds of another run does not concern this one
            self._run = uuid.uuid4().hex[:8]
        on_record = read_ledger(self._folder(trainer)) if trainer.is_global_zero else []
        self._run, on_record = trainer.strategy.broadcast((self._run, on_record))
        everything = self.is_replay and not self._steps
        own = [done for done in on_record if (everything or done.run == self._run) and done.factor is not None]
        self._changes.update({done.id: (done.step, float(done.factor or 1.0)) for done in own})
        if self._changes:
            self._take_the_rate(trainer, pl_module)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) if self.folder is None else self.folder

    def _kill_file(self, trainer: Trainer) -> Path | None:
        return None if self.kill_file is None else self._folder(trainer) / Path(self.kill_file).expanduser()

    # -- the learning rate -------------------------------------------------------------------------------------------

    def _take_the_rate(self, trainer: Trainer, module: LightningModule) -> None:
        # Not before there is an order: without one no hook is on the optimizer and no key in the log.
        EffectiveLR.within_a_fit(trainer, module).add("RunControl", self._rate)

    def _rate(self, mark: Mark, lr: float, group: int) -> float:
        return lr * self.factor(mark.steps)

    def factor(self, steps: int) -> float:
        """What the rate of the step that follows so many is multiplied by."""
        return math.prod(factor for step, factor in self._changes.values() if step <= steps)

    # -- orders ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._put_back(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if window_is_open(trainer):
            return
        before, self._steps = self._steps, Progress.of(trainer).steps
        self._is_within_hooks = any(step == self._steps for step, _ in self._changes.values())
        if self._is_within_hooks:  # in the run that is repeated, as it was in the first
            after_batch_end(trainer, self._leave_hooks)
        if self._changes and is_logging_step(trainer):
            log_number(pl_module, "stability/control_lr_factor", self.factor(before))
        if self.is_replay or self._steps % self.every_steps:
            return
        found = self._new(trainer) if trainer.is_global_zero else []
        if self._ranks.largest(len(found)):
            orders: list[Done] = self._ranks.from_rank_0(found)
            # What is saved is to hold what callbacks behind this one do at the end of the batch.
            after_batch_end(trainer, lambda: self._carry_all_out(trainer, pl_module, orders))

    def _leave_hooks(self) -> None:
        self._is_within_hooks = False

    def _carry_all_out(self, trainer: Trainer, module: LightningModule, orders: list[Done]) -> None:
        for done in orders:
            self._carry_out(trainer, module, done)

    def _new(self, trainer: Trainer) -> list[Done]:
        """What is to be carried out now, on record already."""
        folder, kill_file = self._folder(trainer), self._kill_file(trainer)
        files = waiting(folder)
        orders = [order for _, order in files]
        if kill_file is not None and kill_file.exists():
            orders.append(Order("kill file", "stop", asked=now()))
        if not orders:
            return []
        on_record = read_ledger(folder)
        known = {done.id for done in on_record} - {"kill file"}
        new = [order for order in orders if order.id not in known]
        lines = [
            Done(number, self._run, order.id, order.action, self._steps, order.factor, order.asked, now())
            for number, order in enumerate(new, len(on_record) + 1)
        ]
        if lines and not self._is_written(folder, lines):
            return [line for line in lines if line.action == "stop"]
        for path, _ in files:
            path.unlink(missing_ok=True)
        return lines

    def _is_written(self, folder: Path, lines: list[Done]) -> bool:
        try:
            write_ledger(folder, lines)
        except OSError as error:
            if not self._warned:
                rank_zero_warn(f"RunControl: cannot write to {folder}: {error}; until it can, only a stop is heeded.")
            self._warned = True
            return False
        return True

    def _carry_out(self, trainer: Trainer, module: LightningModule, done: Done) -> None:
        evidence = {"order": done.action, **({} if done.factor is None else {"factor": done.factor})}
        emit(trainer, Event(self._steps, "control", evidence))
        if done.factor is not None:
            for callback in trainer.checkpoint_callbacks:
                if hasattr(callback, "keep_now"):
                    callback.keep_now(trainer, f"before lr*={done.factor:g}")
            self._changes[done.id] = (done.step, done.factor)
            self._take_the_rate(trainer, module)
        elif done.action == "validate":
            self._validate(trainer)
        elif done.action == "save":
            save_now(trainer, str(self._folder(trainer)), "asked")
        elif not self.stopped:
            self.stopped = True
            rank_zero_info(f"stop asked for: writing a checkpoint after step {self._steps}, then stopping.")
            save_now(trainer, str(self._folder(trainer)))
            self._end.end(trainer)

    def _validate(self, trainer: Trainer) -> None:
        if not trainer.enable_validation:
            rank_zero_warn("RunControl: a validation was asked for, and there is nothing to validate with.")
        elif self._trainers_own is None:
            self._trainers_own = trainer.val_check_batch, trainer.check_val_every_n_epoch
            trainer.val_check_batch, trainer.check_val_every_n_epoch = _Now(1), self._every_epoch(trainer)
            validate_by_clock(trainer)

    @staticmethod
    def _every_epoch(trainer: Trainer) -> int | None:
        """In place of every second epoch or fewer; None, which goes past the ends of epochs, stays."""
        return None if trainer.check_val_every_n_epoch is None else 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back(trainer)  # before the end of the epoch, at which others look at the trainer's own

    def _put_back(self, trainer: Trainer) -> None:
        if self._trainers_own is None:
            return
        interval, trainer.check_val_every_n_epoch = self._trainers_own
        self._trainers_own = None
        if isinstance(trainer.val_check_batch, _Now):  # not so once a new loader has its own
            trainer.val_check_batch = interval

    # -- end, state --------------------------------------------------------------------------------------------------

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._put_back(trainer)
        forget_batch_end(trainer)
        self._is_within_hooks = False
        self._end.undo(trainer)
        if self._changes:
            EffectiveLR.of(trainer).remove("RunControl")
        self._ranks.close()

    def state_dict(self) -> dict[str, Any]:
        # What is on record of later steps, in the run that is repeated, does not belong to this one's past yet.
        first_unknown = self._steps + (not self._is_within_hooks)
        past = {name: list(change) for name, change in self._changes.items() if change[0] < first_unknown}
        return {"changes": past}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._changes = {name: (int(step), float(factor)) for name, (step, factor) in state_dict["changes"].items()}
        self._steps = max((step for step, _ in self._changes.values()), default=0)

    # The run's name stands apart from the state: it tells runs apart that compute the same.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint.setdefault(KEY, {})["control"] = self._run

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._run = checkpoint.get(KEY, {}).get("control", "")


class _Now(int):
    """An interval between validations that has always just passed: zero on the right side of ``%``."""

    def __rmod__(self, micro_batches: int) -> int:
        return 0
