"""How long a run takes to come back after its loss has spiked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import refuse_all
from .events import Event, Events, emit
from .loss_return import LossReturn
from .monitor import Monitor
from .progress import Progress
from .rank_mean import mean_over_ranks
from .scalars import Scalars
from .window_loss import WindowLoss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class RecoveryTime(Monitor):
    """Measure how many steps the training loss takes to return after a spike.

    Whether and how fast a loss comes back says more of a run's health than the spike: in the BigScience 104B runs some
    came back within hundreds of steps, one took about two thousand, and more often they never did. The time grows
    before a run dies.

    A spike is a loss more than ``rise`` above the median of the last hundred, and six robust standard deviations of
    them, or not finite; it is over when the median of five losses is back among those. The loss is the mean over the
    window and all ranks, of every step; steps without one are passed over. Losses wait on the device for the next
    measurement, or save, which takes one collective and reads them all.

    Events, the same on all ranks: ``spike_recovered`` when it is over, ``spike_not_recovered`` after ``patience``
    steps; each with the step at which it began, the steps it took, the loss before and at the peak. What is learned of
    the loss is saved and restored.

    Logged: ``stability/recovering_steps`` (length so far of the spike under way, 0: none), ``stability/recovery_steps``
    (length of the last one, 0: none yet), ``stability/loss_spikes`` (how many there were).

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        rise: In the loss's own unit, > 0.
        patience: Steps after which a spike is given up and the level then reached is the new normal, >= 5.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when a number is out of range.

    Example::

        >>> Trainer(callbacks=[RecoveryTime(rise=0.5)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, rise: float = 0.2, patience: int = 2000) -> None:
        super().__init__(every_steps)
        problems = []
        if not rise > 0:
            problems.append(f"`RecoveryTime(rise={rise})`: must be above 0.")
        if patience < 5:
            problems.append(f"`RecoveryTime(patience={patience})`: must be at least 5.")
        refuse_all(problems)
        self.rise, self.patience = rise, patience
        self._recovery = LossReturn(100, rise, patience)
        self._window = WindowLoss()
        self._waiting: list[tuple[int, Tensor]] = []  # (step, this rank's loss on the device)
        self._trainer: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Progress.of(trainer)
            Events.of(trainer)
            self._trainer, self._waiting = trainer, []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window.clear()

    def drop_window(self) -> None:
        self._window.clear()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._window.add(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self._window.is_empty:
            self._waiting.append((Progress.of(trainer).steps, self._window.own(trainer)))
            self._window.clear()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self.has_ended(trainer):
            return
        self._read()
        since = self._recovery.steps_since(Progress.of(trainer).steps)
        Scalars.of(trainer).add(
            [f"stability/{name}" for name in ("recovering_steps", "recovery_steps", "loss_spikes")],
            [float(since), float(self._recovery.last), float(self._recovery.spikes)],
        )

    def _read(self) -> None:
        """Judge the losses that wait: all ranks together."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._trainer is None:
            return
        losses = mean_over_ranks(self._trainer, torch.stack([loss for _, loss in waiting]).double())
        for (step, _), loss in zip(waiting, losses.tolist(), strict=True):
            ended = self._recovery.observe(step, loss)
            if ended is not None:
                kind = "spike_recovered" if ended.back else "spike_not_recovered"
                steps = self._recovery.last
                evidence = {"began": ended.began, "steps": steps, "loss_before": ended.before, "loss_peak": ended.peak}
                emit(self._trainer, Event(step, kind, evidence))

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return self._recovery.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._recovery.load_state_dict(state_dict)
        self._waiting = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer, self._waiting = None, []
