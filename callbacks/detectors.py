"""Watch a run while it runs: the detectors, fed with every step's loss and gradient norm and with what is logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .base import MisconfigurationException, StabilityCallback, is_logging_step, log_number, refuse_manual_optimization
from .detector import Detector
from .event_ring import EventRing
from .events import Events, emit
from .grad_norm import GradNorm
from .host_agreement import HostAgreement
from .logged_now import LoggedNow
from .loss_scale_collapse import LossScaleCollapse
from .low_loss import LowLoss
from .plateau import Plateau
from .positions import stream_position
from .private_optimizer_names import loss_scale
from .progress import Progress
from .slow_divergence import SlowDivergence
from .spike_alarm import SpikeAlarm
from .surge import Surge
from .window_loss import WindowLoss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_Row = tuple[tuple[int, ...], list[float]]  # ((step,), numbers), as a ring returns it
_VALIDATION = ("val/loss", "val_loss")  # what a module may log its validation loss as


class Detectors(StabilityCallback):
    """Tell when a run begins to go wrong: a spike, a slow divergence, a plateau, a loss too low, a loss scale that
    collapses, an inner quantity that surges. Nothing is done about it: the run is bit-identical to one without.

    They see every optimizer step's loss (mean over window and ranks) and global gradient norm; at logging steps also
    the loss scale and every scalar logged in that step whose name ``surge`` watches, before this callback's end of the
    batch (in ``training_step``, say; what the trainer still has from an earlier step is no observation); at validations
    ``val/loss`` or ``val_loss``.
    Numbers travel to the host without a wait and are read ``LAG`` = 4 steps late on CUDA, before a save and at the end
    at once. What is said depends on the numbers alone: the same on all ranks, and after a resume. Under a loss scale a
    gradient norm that is not finite is an overflow, which the scaler cures, and no spike; ``loss_scale`` tells of
    many in a row.

    What is found is an event (see :func:`~.events.emit`): one line for people, one in ``events.jsonl``, a text to the
    loggers; with the stream indices of the samples of its step. :class:`~.alarm.Alarm` runs a command for each.

    Each is on with the options of its class, unless it is given some, and off with ``null`` or ``false``. The rules and
    their sources stand in the class of each.

    Logged at logging steps: ``stability/events`` (events so far).

    Args:
        spike: A loss or gradient norm far above its band, or not finite.
        slow_divergence: A loss that rises slowly above its best.
        plateau: A validation loss that no longer improves.
        low_loss: A loss too good to be true.
        loss_scale: A loss scale that collapses.
        surge: A logged quantity of the inside that grows steadily.

    Attributes:
        listeners: By name, what is called with every step's number and scalars, on every rank, after the detectors.

    Raises:
        MisconfigurationException: when every detector is off, or optimization is manual.

    Example::

        >>> Trainer(callbacks=[Detectors(spike=SpikeAlarm(z_score=10.0))], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 75  # after the monitors have handed in what they measured

    def __init__(
        self,
        spike: SpikeAlarm | bool | None = True,
        slow_divergence: SlowDivergence | bool | None = True,
        plateau: Plateau | bool | None = True,
        low_loss: LowLoss | bool | None = True,
        loss_scale: LossScaleCollapse | bool | None = True,
        surge: Surge | bool | None = True,
    ) -> None:
        self.spike, self.slow_divergence, self.plateau = spike, slow_divergence, plateau
        self.low_loss, self.loss_scale, self.surge = low_loss, loss_scale, surge
        chosen: dict[type[Detector], Any] = {SpikeAlarm: spike, SlowDivergence: slow_divergence, Plateau: plateau}
        chosen.update({LowLoss: low_loss, LossScaleCollapse: loss_scale, Surge: surge})
        # Copies: a detector learns, and one that was given may stand in another trainer too.
        self._detectors: list[Detector] = [
            cls() if given is True else deepcopy(given) for cls, given in chosen.items() if given
        ]
        if not self._detectors:
            raise MisconfigurationException("`Detectors`: all detectors are null; leave the callback out.")
        self.listeners: dict[str, Callable[[int, Mapping[str, float]], None]] = {}
        self._loss = WindowLoss()
        self._logged = LoggedNow()
        self._ranks = HostAgreement()
        self._trainer: Trainer | None = None  # while training: a save, which hands none over, flushes
        self._every_step = EventRing()  # rows of loss and gradient norm
        self._at_logging = EventRing()  # rows of the scalars named beside
        self._names: dict[int, list[str]] = {}  # by logging step
        self._windows: dict[int, tuple[int, int]] = {}  # stream positions of the samples of steps on their way
        self._count = 0
        self._last_step = 0  # for which everything was sent

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_manual_optimization(
            pl_module,
            "`Detectors` takes each step's loss and gradient norm from Lightning's own optimizer step; use automatic"
            " optimization.",
        )
        Progress.of(trainer)
        GradNorm.of(trainer)
        Events.of(trainer)
        if self._patterns():
            self._ranks.open(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        self._loss.clear()
        self._logged.clear()
        self._last_step = Progress.of(trainer).steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._logged.begin_batch(trainer)

    def drop_window(self) -> None:
        self._loss.clear()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss.add(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        norm = GradNorm.of(trainer).value
        if self._loss.is_empty or norm is None:  # nothing was backpropagated
            return
        progress = Progress.of(trainer)
        loss = self._loss.mean(trainer).to(norm.device)
        self._loss.clear()
        first = stream_position(progress.start.samples, progress.dropped)
        self._windows[progress.steps] = (first, progress.position)
        self._every_step.push((progress.steps,), torch.stack([loss, norm.to(torch.float32)]))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = Progress.of(trainer).steps
        if step == self._last_step:  # within a window
            return
        self._last_step = step
        if is_logging_step(trainer):
            self._send_logged(trainer, step)
            log_number(pl_module, "stability/events", self._count)
        self._logged.end_step(trainer)
        self._look(trainer, self._every_step.take(step), self._at_logging.take(step))

    def _patterns(self) -> list[str]:
        return [pattern for one in self._detectors if isinstance(one, Surge) for pattern in one.signals]

    def _send_logged(self, trainer: Trainer, step: int) -> None:
        """Send the loss scale and the logged scalars that are watched on their way, as rank 0 has them."""
        patterns = self._patterns()
        logged = {
            name: value
            for name, value in sorted(self._logged.values(trainer).items())
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if patterns:  # a module may have logged on one rank alone, or its own values: decisions must agree
            missing = torch.tensor(math.nan)
            logged = {name: logged.get(name, missing) for name in self._ranks.from_rank_0(list(logged))}
        scale = loss_scale(trainer)
        if scale is not None:
            logged["loss_scale"] = scale
        if not logged:
            return
        device = trainer.strategy.root_device
        row = torch.stack([value.detach().to(device, torch.float32, non_blocking=True) for value in logged.values()])
        if trainer.world_size > 1:
            dist.broadcast(row, src=0)
        self._names[step] = list(logged)
        self._at_logging.push((step,), row)

    def _look(self, trainer: Trainer, steps: list[_Row], logged: list[_Row]) -> None:
        """Show the detectors what has arrived, in order of steps, and tell of what they find."""
        scaled = loss_scale(trainer) is not None
        values: dict[int, dict[str, float]] = {}
        for (step,), (loss, norm) in steps:
            values[step] = {"loss": loss, "grad_norm": norm}
            if scaled:
                values[step]["overflow"] = float(not math.isfinite(norm))
            if scaled and not math.isfinite(norm):
                del values[step]["grad_norm"]
        for (step,), row in logged:
            values.setdefault(step, {}).update(zip(self._names.pop(step), row, strict=True))
        for step in sorted(values):
            self._show(trainer, step, values[step])
            self._windows.pop(step, None)

    def _show(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        window = self._windows.get(step)
        for detector in self._detectors:
            for event in detector.observe(step, values):
                self._count += 1
                emit(trainer, replace(event, samples=None if window is None else list(window)))
        for _, listener in sorted(self.listeners.items()):
            listener(step, values)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        name = next((name for name in _VALIDATION if name in trainer.callback_metrics), None)
        if name is not None:
            value = trainer.strategy.broadcast(float(trainer.callback_metrics[name]))
            self._show(trainer, Progress.of(trainer).steps, {"val_loss": value})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._flush()

    def handle_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = None
        self._ranks.close()

    def _flush(self) -> None:
        if self._trainer is not None:
            self._look(self._trainer, self._every_step.flush(), self._at_logging.flush())

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        return {"detectors": {one.kind: one.state_dict() for one in self._detectors}, "count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._count = int(state_dict["count"])
        for detector in self._detectors:
            detector.load_state_dict(state_dict["detectors"].get(detector.kind, {}))
