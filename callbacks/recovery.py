"""Step back and go on: a ladder of remedies for a run in trouble, each bounded, written down, and in force for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .base import StabilityCallback, is_logging_step, log_number
from .checkpoint_health import KEPT, health, largest_activation
from .event_ring import LAG
from .logged_now import LoggedNow
from .one_beginning import refuse_beginnings_that_differ
from .positions import merge_ranges
from .private_optimizer_names import loss_scale
from .progress import Progress
from .recovery_book import ledger_folders
from .recovery_heard import Heard
from .recovery_ladder import Decision, Outcome, RecoveryLadder
from .recovery_ledger import Entry
from .recovery_refusals import (
    refuse_after_the_end,
    refuse_branch_left_behind,
    refuse_data_that_cannot_be_dropped,
    refuse_incomplete,
)
from .recovery_remedies import Remedies
from .recovery_rungs import DEFAULT_RUNGS, RungOptions, check, standard_triggers
from .recovery_standing import Standing
from .safe_checkpoints import KEY, SafeCheckpoints

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Recovery(StabilityCallback):
    """Answer trouble by a ladder of remedies, from waiting to an end of the run, as people did by hand over logbooks.

    Trouble is an event of a kind in ``triggers`` (see :class:`~.detectors.Detectors`, which must be there), and begins
    at the rung that stands there. It is over when the loss is back at its level; if it is not after the rung's
    ``steps``, the next rung follows. Every rung has a budget and is passed over when it is spent; beyond the last one
    the run stops. What each rung does, and all its options: :class:`~.recovery_rungs.Rung`.

    - ``wait``: nothing; many spikes pass (BigScience 104B: within hundreds of steps, once two thousand).
    - ``skip``: the next steps change nothing, so that a stretch of data passes by.
    - ``lr``: the learning rate is cut, with a cooldown and a floor (OPT-175B).
    - ``rewind``: back to the last *healthy* checkpoint, and past the data that were read around the trouble (PaLM,
      arXiv:2204.02311, section 5.1), which leave the run for good. Or to a named step.
    - ``stop``: raise ``RecoveryStopped`` on all ranks.

    **Healthy** is judged when a checkpoint is written: no trouble under way, the last losses in their band, a loss
    scale of at least 1, activations not rising (where ``ActivationMonitor`` measures them). A rewind goes to the newest
    healthy one from before the trouble; when the same window fails again, to an older one than last time.

    **A rewind is exact.** Weights, moments, counters, windows and statistics are those of the checkpoint, so that what
    was learned in the branch that is left is forgotten, and the run comes to the very weights of one that was never
    given the dropped data. Whole global batches are dropped, by their place in the sample stream. It needs
    ``SafeCheckpoints``, and a loader that leaves out ``Progress.dropped``: ``TokenDataModule`` does,
    :class:`~.resuming_batches.ResumingBatches` makes any map-style data set do so. A callback cannot begin a fit: use
    :func:`~.rewinding_fit.fit_with_recovery` (the command line does). Without it a rewind is passed over, and the
    ladder goes as far as ``stop``.

    **The ledger**, ``recovery.jsonl``: one line per thing done, with when, why, evidence, action and result, on disk
    before it is done. It is the authority: after a kill at any moment the run goes on where it was, budgets and dropped
    data included. A rewind whose line cannot be written (a full disk) is not made, and the next rung follows. Each
    rewind opens a branch; checkpoints of the one that is left are renamed ``NAME.branch-N``.

    Decisions follow from reduced numbers, on CUDA 4 steps late, and fall on the same step on all ranks.

    Logged at logging steps: ``stability/recovery_rung`` (where the run stands, from 1; 0: no trouble),
    ``stability/recovery_lr_factor`` (what the learning rate is multiplied by) and ``stability/rewinds``.

    Args:
        rungs: Lowest first; by default wait, lr, rewind, stop.
        triggers: Kind of event -> ``do`` of the rung where it begins, or the rung's place from 1. A rung that is not
            there is passed over to the next.
        keep: How many of the newest healthy checkpoints a retention that asks is told to keep, >= 1.
        restart: Leave the process for a rewind (see ``recovery_exit``), for a launcher to start anew as with
            ``torchrun --max-restarts``, in place of a new fit in the same process.
        after_stop: What a resume does after the ladder has ended the run: ``refuse``, or ``go_on`` with new budgets.
        folder: Of the ledger; ``None``: the run's folder, or the trainer's ``default_root_dir``.
        action: ``act``, or ``log``: decisions are written down, and the run is bit-identical to one without. Its lines
            count in the budgets of a run that logs alone; a resume that acts makes the decisions anew.

    Raises:
        MisconfigurationException: when rungs or triggers are wrong (all at once), or what a rung needs is not there.
        RecoveryStopped: when the ladder has come to its end.

    Example::

        >>> ladder = [{"do": "wait", "steps": 50}, {"do": "rewind", "factor": 0.8}, {"do": "stop"}]
        >>> Trainer(callbacks=[Recovery(ladder), Detectors(), SafeCheckpoints()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 80  # after the detectors
    #: The checkpoint that who drives it has found.
    begins_with: Path | str | None = None

    def __init__(
        self,
        rungs: list[RungOptions] | None = None,
        triggers: dict[str, str | int] | None = None,
        keep: int = 3,
        restart: bool = False,
        after_stop: Literal["refuse", "go_on"] = "refuse",
        folder: str | None = None,
        action: Literal["act", "log"] = "act",
    ) -> None:
        others = [] if keep >= 1 else [f"`Recovery(keep={keep})`: must be at least 1."]
        self.rungs = check(DEFAULT_RUNGS if rungs is None else rungs, triggers or {}, others)
        self.triggers = standard_triggers(self.rungs) if triggers is None else dict(triggers)
        self.keep, self.restart, self.after_stop, self.action = keep, restart, after_stop, action
        self.folder = None if folder is None else Path(folder)
        self.is_driven = False
        self._remedies = Remedies(self.rungs, self.acts)
        self._book, self._overrides = self._remedies.book, self._remedies.overrides
        self._ladder = RecoveryLadder(
            self.rungs, self.triggers, lambda index: self._remedies.is_spent(index, self._steps), self.acts
        )
        self._heard = Heard(self.triggers)
        self._activations: list[float] = []
        self._logged = LoggedNow()
        self._trainer: Trainer | None = None
        self._loaded_run: str | None = None
        self._seen = 0  # lines when the checkpoint that was loaded was written
        self._steps = 0
        self._to_pass: Entry | None = None  # a rewind whose window is still ahead

    @property
    def acts(self) -> bool:
        """False: decisions are written down and nothing is done."""
        return self.action == "act"

    @property
    def standing(self) -> Standing:
        """Where the run stands by its ledger."""
        return self._book.now

    # -- begin -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_incomplete(trainer, pl_module, self.rungs)
        refuse_beginnings_that_differ(self.begins_with)
        self._trainer, self._loaded_run, self._seen = trainer, None, 0
        self._heard = Heard(self.triggers)
        self._heard.listen(trainer, self.acts)
        Progress.of(trainer).restored["recovery"] = self._drop
        if self.acts:
            self._overrides.install(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SafeCheckpoints):
                callback.listeners["recovery"] = self._note_checkpoint

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        saved = checkpoint.get(KEY, {}).get("recovery", {})
        self._loaded_run, self._seen = saved.get("run", ""), int(saved.get("seen", 0))
        if not self._loaded_run:
            return
        self._book.find(trainer, self._loaded_run, ledger_folders(trainer, self._folder(trainer)))
        refuse_branch_left_behind(self.standing, int(checkpoint["global_step"]), self._seen)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) if self.folder is None else self.folder

    def _drop(self) -> None:
        """Put what rewinds have dropped into counters that were restored from an older checkpoint."""
        assert self._trainer is not None
        progress, now = Progress.of(self._trainer), self.standing
        progress.dropped = merge_ranges([*progress.dropped, *now.dropped])
        progress.reshuffles = [*progress.reshuffles, *(r for r in now.reshuffles if r not in progress.reshuffles)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = Progress.of(trainer)
        self._steps = progress.steps
        self._logged.clear()
        self._heard.forget_after(self._steps)
        if self._loaded_run or (self._loaded_run is None and progress.steps):
            self._book.go_on_in(self._folder(trainer))
        else:
            self._book.begin(trainer, self._folder(trainer), self._steps)
        if self.acts:
            refuse_data_that_cannot_be_dropped(trainer, self.rungs)
            if self.standing.stopped is not None:
                if self.after_stop == "refuse":
                    refuse_after_the_end(self.standing.stopped, self._book.path)
                self._book.add(trainer, self._steps, "go_on")
            self._overrides.begin(trainer, pl_module, self.standing, self._seen)
            self._to_pass = self.standing.to_pass
        if self.standing.pending is not None:  # under `log` too: it is on record, and its target was loaded
            self._book.set_aside(trainer)
            self._book.add(trainer, self._steps, "begun", done={"branch": self.standing.branch})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._logged.begin_batch(trainer)
        if self.acts:
            self._overrides.before_batch(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self.acts:
            self._overrides.before_step(trainer, optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        progress = Progress.of(trainer)
        if progress.steps == self._steps:  # within a window
            return
        self._steps = progress.steps
        self._remedies.history.note(progress.steps, progress.start.samples, progress.samples - progress.start.samples)
        if is_logging_step(trainer):
            self._log(trainer, pl_module)
        self._logged.end_step(trainer)
        self._pass_window(trainer)
        # A row that a save has brought to the host early is judged on the step on which it would have come.
        lag = LAG if trainer.strategy.root_device.type == "cuda" else 0
        for step, loss, heard in self._heard.due(progress.steps - lag):
            self._answer(trainer, self._ladder.observe(step, loss, heard))

    def _pass_window(self, trainer: Trainer) -> None:
        rewind = self._to_pass
        if rewind is not None and self._steps > rewind.step + rewind.done["after"] and self._ladder.episode is None:
            done = {"of": rewind.done["rung"], "result": "past the window", "rewind": rewind.number}
            self._book.add(trainer, self._steps, "result", done=done, then=self._what_stays())
            self._to_pass = None

    def _what_stays(self) -> str:
        factor = self._overrides.lr_factor
        return f"the learning rate stays at {factor:.4g} of its schedule's" if self.acts and factor < 1 else ""

    def _log(self, trainer: Trainer, module: LightningModule) -> None:
        if (largest := largest_activation(self._logged.values(trainer))) is not None:
            self._activations = [*self._activations, largest][-KEPT:]
        episode = self._ladder.episode
        log_number(module, "stability/recovery_rung", 0 if episode is None else episode.rung + 1)
        log_number(module, "stability/recovery_lr_factor", self._overrides.lr_factor if self.acts else 1.0)
        log_number(module, "stability/rewinds", len(self.standing.rewinds))

    def _note_checkpoint(self, path: Path) -> None:
        """Judge what is about to be saved; every rank is here."""
        trainer = self._trainer
        if trainer is None or not self._book.run:
            return
        found, is_well = loss_scale(trainer), self._ladder.band.is_well()
        scale = None if found is None else float(found)
        judged = health(is_well, self._ladder.episode is not None, scale, self._activations)
        self._book.note_checkpoint(trainer, Progress.of(trainer).steps, path, judged)

    def checkpoints_to_keep(self) -> set[Path]:
        """The newest healthy ones, for whoever deletes old checkpoints."""
        named = {rung.to for rung in self.rungs if rung.do == "rewind"}
        return self._book.to_go_back_to(self.keep, named) if named else set()

    def _answer(self, trainer: Trainer, found: Decision | Outcome | None) -> None:
        if isinstance(found, Outcome):
            done = {"of": found.rung + 1, "result": "recovered", **({} if self.acts else {"acted": False})}
            told: dict[str, Any] = {"evidence": found.evidence, "done": done, "then": self._what_stays()}
            self._book.add(trainer, self._steps, "result", **told)
        while isinstance(found, Decision):
            criterion = self._ladder.criterion(found.rung)
            if self.acts and self._remedies.rung(found.rung).do == "stop":
                self._ladder.end()
            may_rewind = self.is_driven or self.restart
            why_not = self._remedies.take(trainer, self._steps, found, criterion, may_rewind)
            if why_not is None:
                return
            found = self._ladder.refuse(replace(found, evidence={**found.evidence, **why_not}))

    # -- end, state --------------------------------------------------------------------------------------------------

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or self._trainer is None:
            return
        self._trainer = None
        self._heard.stop_listening(trainer, self.acts)
        Progress.of(trainer).restored.pop("recovery", None)
        if self.acts:
            self._overrides.end(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SafeCheckpoints):
                callback.listeners.pop("recovery", None)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Not in `state_dict`: it names a run and is no part of what the run computes.
        own = {"run": self._book.run, "seen": len(self._book.entries)}
        checkpoint.setdefault(KEY, {}).update(recovery=own)

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": repr([self.rungs, sorted(self.triggers.items())]),
            "ladder": self._ladder.state_dict(),
            "overrides": self._overrides.state_dict(),
            "history": self._remedies.history.state_dict(),
            "activations": list(self._activations),
            "heard": self._heard.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ladder.load_state_dict(state_dict["ladder"])
        if state_dict["settings"] != repr([self.rungs, sorted(self.triggers.items())]):
            self._ladder.end()  # places of rungs may mean others now
        self._overrides.load_state_dict(state_dict["overrides"])
        self._remedies.history.load_state_dict(state_dict["history"])
        self._activations = [float(v) for v in state_dict["activations"]]
        self._heard.load_state_dict(state_dict["heard"])
