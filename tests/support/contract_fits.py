"""Fits of the contract's project with one callback: all that the promises look at."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contract_entries import CLASSES, ENTRIES, make, takes_action
from contract_project import GLOBAL_BATCH, MICRO_BATCH, STEPS, Host, fit
from lightning.pytorch import Callback, LightningModule, Trainer
from no_sync import NoSync
from tiny_fit import train_more
from torch import Tensor

from lit_stable.callbacks import AccumulationWindows, Event, Progress, SafeCheckpoints, StepSeed, emit
from lit_stable.callbacks.event_ring import LAG

SAVE_POINTS = ("before_first_step", "mid_window", "step_boundary")
#: In a run of two epochs.
RARE_POINTS = ("after_fit", "epoch_end", "in_validation", "at_exception")


class SaveAtPoints(Callback):
    """Saves once at each of some points.

    Of ``SAVE_POINTS``: before any step, within the second (it has the spike), and after that. Of ``RARE_POINTS``: at
    the end of the first epoch, in a validation (within the second step, or after it), and when the run fails within the
    fifth.
    """

    def __init__(self, folder: Path, points: tuple[str, ...] = SAVE_POINTS) -> None:
        self.folder = folder
        self.left = list(points)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, "before_first_step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        progress = Progress.of(trainer)
        if progress.steps == 1 and progress.pending_samples:
            self._save(trainer, "mid_window")
        if progress.steps == 2 and not progress.pending_samples:
            self._save(trainer, "step_boundary")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, "epoch_end")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        progress = Progress.of(trainer)
        if progress.steps == (1 if progress.pending_samples else 2):
            self._save(trainer, "in_validation")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        progress = Progress.of(trainer)
        if self.left == ["at_exception"] and progress.steps == 4 and progress.pending_samples:
            raise Failure

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._save(trainer, "at_exception")

    def _save(self, trainer: Trainer, point: str) -> None:
        if point in self.left:
            self.left.remove(point)
            trainer.save_checkpoint(self.folder / f"{point}.ckpt")


class Failure(Exception):
    """On purpose."""


class Trouble(Callback):
    """Tells of a spike in the second step: in that step, or as late as on a CUDA device."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        lag = LAG if trainer.strategy.root_device.type == "cuda" else 0
        if trainer.global_step == 2 + lag and not Progress.of(trainer).pending_samples:
            emit(trainer, Event(2, "spike", {}))


Names = tuple[str, ...]


def own(names: Names, arguments: dict[str, dict[str, Any]] | None = None) -> list[Callback]:
    """Callbacks by their classes' names, with those without which they cannot be; by default so that they act."""
    needed = {other: given for name in names for other, given in ENTRIES[name].beside.items() if other not in names}
    acts = {name: ENTRIES[name].acts for name in names}
    trouble: list[Callback] = [Trouble()] if any(ENTRIES[name].trouble for name in names) else []
    return [*trouble, *(make(name, given) for name, given in {**acts, **(arguments or {}), **needed}.items())]


def fit_alone(host: Host, callbacks: list[Callback], dropout: float, width: int) -> Trainer:
    """Without anything else of ours, in Lightning's own windows unless a callback opens its own."""
    windows = 1 if any(isinstance(c, AccumulationWindows) for c in callbacks) else host.window
    torch.manual_seed(7)
    options = {"width": width, "dropout": dropout, "accumulate_grad_batches": windows}
    return fit(host, *callbacks, resumes=False, poison={}, **options)


def fit_in_company(host: Host, callbacks: list[Callback], *others: Callback, **options: Any) -> Trainer:
    """With exact windows and seeds; under sharding also with whole optimizer state from the start."""
    company: list[Callback] = [StepSeed(1), AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH)]
    company += [SafeCheckpoints()] if host.sharded else []
    around = [c for c in company if not any(isinstance(other, type(c)) for other in callbacks)]
    return fit(host, *callbacks, *around, *others, **options)


class Run:
    """What a fit came to on this rank."""

    def __init__(self, trainer: Trainer) -> None:
        (optimizer,) = trainer.optimizers
        module: Any = trainer.lightning_module
        held = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
        self.weights = [_local(p) for p in module.parameters()]  # this rank's own piece of each
        self.optimizer = [{key: _local(value) for key, value in state.items()} for state in held]
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.losses = [float(loss) for loss in module.losses]
        self.metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        ours = [c for c in trainer.callbacks if type(c).__name__ in CLASSES]  # type: ignore[attr-defined]
        self.states = {type(c).__name__: copy.deepcopy(c.state_dict()) for c in ours}

    def numbers(self) -> dict[str, Any]:
        """All that must be equal in two runs of the same work, but for the losses, of which a resumed run has fewer."""
        return {"weights": self.weights, "optimizer": self.optimizer, "rates": self.rates}


def _local(value: Any) -> Any:
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def touched(trainer: Trainer) -> dict[str, Any]:
    """All that a callback may have left behind on the trainer, its parts, the optimizer and the module."""
    optimizer: Any = trainer.optimizers[0]
    module = trainer.lightning_module
    return {
        "trainer": sorted(vars(trainer)),
        "signals": sorted(vars(trainer._signal_connector)),
        "strategy": sorted(vars(trainer.strategy)),
        "loop": sorted(vars(trainer.fit_loop.epoch_loop)),
        "optimizer": sorted(vars(optimizer)),
        "step hooks": [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
        "windows": type(trainer.accumulate_grad_batches).__name__,
        "validation": [type(trainer.val_check_batch).__name__, trainer.val_check_batch],
        "frequencies": [type(config.frequency).__name__ for config in trainer.lr_scheduler_configs],
        "module": sorted(vars(module)),
        "module hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
        "trained": [p.requires_grad for p in module.parameters()],
    }


@functools.cache
def bare(host: Host, dropout: float, width: int) -> tuple[Run, dict[str, Any]]:
    """A fit without any callback of ours, and what such a fit leaves behind by itself."""
    trainer = fit_alone(host, [], dropout, width)
    return Run(trainer), touched(trainer)


@functools.cache
def company_alone(host: Host, width: int, steps: int) -> Run:
    return Run(fit_in_company(host, [], width=width, steps=steps))


class QuickRuns:
    """A fit that saves once, within a window, and one that goes on from there."""

    points: tuple[str, ...] = ("mid_window",)

    def __init__(self, names: Names, host: Host, folder: Path) -> None:
        self.names, self.host, self.folder = names, host, folder
        self.entries = [ENTRIES[name] for name in names]
        folder.mkdir(parents=True, exist_ok=True)
        self.dropout = 0.0 if any(entry.draws for entry in self.entries) else 0.3
        self.width = max(entry.width for entry in self.entries)
        late = host.accelerator == "gpu" and any(entry.trouble for entry in self.entries)
        self.steps = STEPS + (LAG if late else 0)
        self.bare, self.left_by_itself = bare(host, self.dropout, self.width)
        self._fit()
        # Under sharding each rank has other pieces of the weights.
        whole = None if host.sharded else self.straight.weights
        runs = [self.straight, *self.resumed.values()]
        self.ranks = gathered([whole, [[run.states, run.rates, run.metrics] for run in runs]])

    def _fit(self) -> None:
        trainer = self._in_company(SaveAtPoints(self.folder, self.points))
        self.straight, self.left_behind = Run(trainer), touched(trainer)
        self.resumed = {point: Run(self._resume(point)) for point in self.points}

    def _in_company(self, *others: Callback, **options: Any) -> Trainer:
        options = {"width": self.width, "steps": self.steps, **options}
        return fit_in_company(self.host, own(self.names), *others, **options)

    def _resume(self, point: str) -> Trainer:
        torch.manual_seed(1234)  # whatever the generators held before must not matter
        return self._in_company(resume=self.folder / f"{point}.ckpt")


class RareRuns(QuickRuns):
    """Five steps, an epoch ends after three; saved where saves are rare, by a run that fails and by one that ended."""

    points = RARE_POINTS

    def _fit(self) -> None:
        self.points = self.points[1:] if any(entry.ends for entry in self.entries) else self.points
        trainer = self._in_company()
        self.straight, self.left_behind = Run(trainer), touched(trainer)
        with contextlib.suppress(Failure):
            self._in_company(SaveAtPoints(self.folder, RARE_POINTS[1:]))
        self._in_company(steps=3).save_checkpoint(self.folder / "after_fit.ckpt")
        self.resumed = {point: Run(self._resume(point)) for point in self.points}

    def _in_company(self, *others: Callback, **options: Any) -> Trainer:
        return super()._in_company(*others, **{"steps": 5, "limit_train_batches": 3 * self.host.window, **options})


class Runs(QuickRuns):
    """All fits that the promises look at; every rank makes them, before anything is judged."""

    points = SAVE_POINTS

    def _fit(self) -> None:
        entries = dict(zip(self.names, self.entries, strict=True))
        idle = {name: entry.idle for name, entry in entries.items() if entry.idle is not None}
        logs = {name: {**entry.acts, "action": "log"} for name, entry in entries.items() if takes_action(name)}
        self.company = company_alone(self.host, self.width, self.steps)
        self.idle = self._alone(idle)
        self.log = self._alone({**idle, **logs}) if logs else None
        trainer = self._in_company()
        self.straight, self.left_behind = Run(trainer), touched(trainer)
        self.by_itself = {name: self._by_itself(name) for name in idle}
        self.saving = Run(self._in_company(SaveAtPoints(self.folder)))
        self.resumed = {point: Run(self._resume(point)) for point in self.points}
        self.second_fit = self._fit_again(trainer)

    def _by_itself(self, name: str) -> Run:
        """One that acts, without those that are tried with it."""
        if len(self.names) == 1:
            return self.straight
        return Run(fit_in_company(self.host, own((name,)), width=self.width, steps=self.steps))

    def _alone(self, arguments: dict[str, dict[str, Any]]) -> Run:
        return Run(fit_alone(self.host, own(self.names, arguments), self.dropout, self.width))

    @staticmethod
    def _fit_again(trainer: Any) -> list[int]:
        train_more(trainer, 2)
        trainer.fit(trainer.lightning_module, trainer.datamodule)
        return [trainer.global_step, Progress.of(trainer).steps]


def fit_without_waiting(host: Host, name: str) -> Trainer:
    """Twelve steps in company, with two spikes; where it promises so, steps 3 to 9 may not wait for the device.

    Nothing is logged in those steps, and nothing validated, but by a callback whose work it is.
    """
    quiet = {"steps": 12, "log_every_n_steps": 100, "val_check_interval": 1_000_000, "poison": {1: 1e4, 5: 1e4}}
    watch = [] if ENTRIES[name].waits else [NoSync()]
    return fit_in_company(host, own((name,)), *watch, width=ENTRIES[name].width, **quiet)


def gathered(value: Any) -> list[Any]:
    """What each rank has."""
    if not dist.is_initialized():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box
