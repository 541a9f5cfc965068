"""How long steps take, which were slow, and which rank held the others up."""

from __future__ import annotations

import math
import socket
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .base import refuse_all
from .device_probe import DeviceProbe
from .events import Event, Events, emit
from .monitor import Monitor
from .private_names import restore_sigterm_broadcast, watch_sigterm_broadcast
from .progress import Progress
from .rank_gather import gather_objects, gather_ranks
from .scalars import Scalars
from .step_clock import StepClock, calls_that_gather
from .stragglers import Late, UsualTime, latest, steady

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_PROBE_LIMIT = 1.15  # times the usual card's, above which one is called slow


class StepTimer(Monitor):
    """Time every step on every rank; tell of a slow one, and name the rank and the host that the others waited for.

    In a step in which one rank is late all ranks take equally long: the others wait in the next collective. So each
    rank also clocks the time it spends on its own: loading data, hooks, and ``training_step`` outside of the network
    where the weights are sharded, else all of it. Who spends more of it than the usual rank is named: a sleep of 0.2
    seconds on rank 1 is rank 1's, not rank 0's that waits for it. A delay inside the backward pass, or inside a sharded
    network's forward pass, is seen as slow but laid to nobody. On CUDA a card that has become slow is found by a small
    piece of work of its own on measured steps.

    Ranks exchange their clocks once per measurement, over the steps before; in between nothing waits. Validations are
    left out of the time; the first steps of a fit, and those with a checkpoint in them, are not judged.

    Events, the same on all ranks: ``slow_step`` (the worst of a measurement) and ``straggler`` (a rank that was late in
    most steps of a measurement; told again when it is another rank or after it was none), with seconds, the usual
    seconds, rank and host where one is late by more than ``margin_seconds``; ``slow_device`` likewise.

    Logged: ``stability/step_seconds`` (median), ``stability/step_seconds_max``, both of the slowest rank;
    ``stability/late_seconds`` (mean of the time by which the last rank was later than the usual one) and
    ``stability/late_rank`` (the one that was most often last).

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        slow_factor: A step is slow above this many times the median of the last hundred, > 1.
        margin_seconds: And by at least so many seconds, > 0; also what a rank must be late by to be named.
        warmup_steps: Steps at the start of a fit that are not judged, >= 0.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when a number is out of range.

    Example::

        >>> Trainer(callbacks=[StepTimer(slow_factor=1.5)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 97  # after all that talks between ranks at the end of a step, so that none of it is ours

    def __init__(
        self,
        every_steps: int | None = None,
        slow_factor: float = 2.0,
        margin_seconds: float = 0.1,
        warmup_steps: int = 3,
    ) -> None:
        super().__init__(every_steps)
        rules = [
            ("slow_factor", slow_factor, slow_factor > 1, "above 1"),
            ("margin_seconds", margin_seconds, margin_seconds > 0, "above 0"),
            ("warmup_steps", warmup_steps, warmup_steps >= 0, "0 or more"),
        ]
        refuse_all(f"`StepTimer({name}={value})`: must be {rule}." for name, value, holds, rule in rules if not holds)
        self.slow_factor, self.margin_seconds, self.warmup_steps = slow_factor, margin_seconds, warmup_steps
        self._clock: StepClock | None = None
        self._probe: DeviceProbe | None = None
        self._usual = UsualTime()
        self._hosts: list[str] = []
        self._handles: list[Any] = []
        self._watched: Trainer | None = None  # whose check for a signal is clocked
        self._seen = self._first = 0
        self._straggler: int | None = None
        self._slow_device: tuple[int | None, int] = (None, 0)  # rank, measurements in a row

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Progress.of(trainer)
            Events.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()
        self._hosts = gather_objects(socket.gethostname())
        self._seen = self._first = Progress.of(trainer).steps
        self._straggler, self._slow_device = None, (None, 0)
        self._usual = UsualTime()
        self._probe = DeviceProbe(trainer.strategy.root_device)
        self._clock = clock = StepClock(trainer.strategy.root_device)
        # `GracefulStop` has silenced it by now, if it is there.
        self._watched = trainer if watch_sigterm_broadcast(trainer, clock.wait_begins, clock.wait_ends) else None
        Progress.of(trainer).ranks.waiting = clock.waiting
        for child in calls_that_gather(pl_module):  # before the hooks that gather the weights
            self._handles.append(child.register_forward_pre_hook(lambda *a: clock.wait_begins(), prepend=True))
            self._handles.append(child.register_forward_hook(lambda *a: clock.wait_ends(), always_call=True))

    # -- the clock ---------------------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._clock is not None:
            self._clock.wait_begins()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._clock is None:
            return
        if Progress.of(trainer).steps == self._seen:  # in mid-window
            self._clock.wait_ends()
            return
        self._seen = Progress.of(trainer).steps
        if self._seen - self._first <= self.warmup_steps:
            self._clock.disregard()
        self._clock.step_ends()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._clock.go_on()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._clock is not None:
            self._clock.disregard()

    # -- the judgement -----------------------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._clock is None or self._probe is None or not self.is_due(trainer):
            return
        rows = self._clock.take()
        self._probe.start()
        device = trainer.strategy.root_device
        own = torch.tensor([*rows, (self._probe.seconds(), 0.0)], dtype=torch.float64, device=device)
        *steps, probes = gather_ranks(own).transpose(0, 1).tolist()  # per step: per rank: (whole, own)
        # The clock and Progress count this step already; what was timed ended with the one before.
        self._judge(trainer, Progress.of(trainer).steps - len(steps), steps)
        self._judge_devices(trainer, [seconds for seconds, _ in probes])

    def _judge(self, trainer: Trainer, first: int, steps: list[list[list[float]]]) -> None:
        judged = [not any(math.isnan(whole) for whole, _ in ranks) for ranks in steps]
        times = [max(w for w, _ in ranks) if fine else math.nan for ranks, fine in zip(steps, judged, strict=True)]
        late = [latest([o for _, o in ranks]) if fine else None for ranks, fine in zip(steps, judged, strict=True)]
        slow = self._usual.slowest(times, self.slow_factor, self.margin_seconds)
        if slow is not None:
            evidence = {"seconds": slow.seconds, "usual_seconds": slow.usual, **self._name(late[slow.place])}
            emit(trainer, Event(first + slow.place, "slow_step", evidence))
        self._tell_of_straggler(trainer, first + len(steps) - 1, steady(late, self.margin_seconds))
        self._log(trainer, [t for t in times if not math.isnan(t)], [one for one in late if one is not None])

    def _name(self, late: Late | None) -> dict[str, Any]:
        if late is None or late.seconds <= self.margin_seconds:
            return {}
        return {"rank": late.rank, "host": self._hosts[late.rank], "late_seconds": late.seconds}

    def _tell_of_straggler(self, trainer: Trainer, step: int, found: Late | None) -> None:
        rank = None if found is None else found.rank
        if found is not None and rank != self._straggler:
            emit(trainer, Event(step, "straggler", self._name(found)))
        self._straggler = rank

    def _judge_devices(self, trainer: Trainer, seconds: list[float]) -> None:
        usual = sorted(seconds)[(len(seconds) - 1) // 2]
        rank = max(range(len(seconds)), key=lambda r: seconds[r])
        before, times = self._slow_device
        slow = seconds[rank] > _PROBE_LIMIT * usual > 0
        self._slow_device = (rank, times + 1 if rank == before else 1) if slow else (None, 0)
        if self._slow_device[1] == 2:  # in a row: one measurement may be a coincidence
            evidence = {"seconds": seconds[rank], "usual_seconds": usual, "rank": rank, "host": self._hosts[rank]}
            emit(trainer, Event(Progress.of(trainer).steps, "slow_device", evidence))

    def _log(self, trainer: Trainer, times: list[float], late: list[Late]) -> None:
        if not times:
            return
        ranks = [one.rank for one in late]
        Scalars.of(trainer).add(
            [f"stability/{name}" for name in ("step_seconds", "step_seconds_max", "late_seconds", "late_rank")],
            [
                sorted(times)[len(times) // 2],
                max(times),
                sum(one.seconds for one in late) / len(late),
                float(max(sorted(set(ranks)), key=ranks.count)),
            ],
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._watched is not None:
            restore_sigterm_broadcast(self._watched)
        self._watched = None
        self._clock = self._probe = None
