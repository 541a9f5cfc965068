"""The one owner of how far a run has come: steps, samples, tokens, and what was dropped or skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import begun_fit
from .base import StabilityCallback, find_or_install, is_logging_step
from .batch_tensors import samples_and_tokens
from .foreign_checkpoint import UncountedRun
from .host_agreement import HostAgreement
from .open_window import OpenWindow
from .positions import Range, merge_ranges, stream_position
from .private_names import window_is_open
from .raw_steps import RawSteps
from .skipped_steps import SkippedSteps

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Mark(NamedTuple):
    """Counters at one moment: optimizer steps (skipped ones included), samples and tokens consumed."""

    steps: int
    samples: int
    tokens: int


class Progress(StabilityCallback):
    """Count what a run has consumed, exactly, so that schedules, data and logs agree after any resume.

    The counters move once per optimizer step, in ``on_before_optimizer_step``: before the scheduler's step and before
    any save. Micro-batches of a window that has not stepped are *pending* and not part of the counters; a resume
    replays that window, and takes Lightning's own count of batches back to its begin. So a checkpoint may be written at
    any moment. (A loader with a ``load_state_dict`` of its own goes on behind them: that is said.)

    Samples are counted over all data-parallel ranks (not the world size: tensor-parallel ranks see the same samples).
    A batch holds B samples and B * T tokens, by its first tensor of shape (B, T, ...), or B of each by its first tensor
    where none has two dimensions; a LightningModule that knows better defines ``count_batch(batch) -> tuple[int, int]``
    (samples, tokens of this rank's batch). Ranks may hold different numbers, and add them up once per step on the host,
    for which the device is not waited for. A data module or LightningModule whose batches have one shape on all ranks,
    and whose loaders end on all at once or never, says so by ``alike_on_ranks = True``: then they need not. An
    optimizer step that was withheld (an ``optimizer_step`` of the LightningModule that only runs the closure) counts as
    skipped, as do one without any loss and one that a gradient scaler leaves out.

    A resume from a checkpoint that was written without it: the samples follow from Lightning's own counters and the
    loader's batch size where that is constant, the tokens from the first batch; what was inferred is printed in one
    line. Otherwise, and where the training loader itself is made from them, they must be given here.

    It installs itself: any callback or data module calls ``Progress.of(trainer)`` in its ``setup``.

    Logged at logging steps: ``progress/samples``, ``progress/tokens``, ``progress/skipped`` (the counters after the
    step).

    Attributes:
        steps: Optimizer steps committed, skipped ones included.
        tokens: Tokens consumed by committed steps.
        dropped: Sorted ``[start, stop)`` ranges of the sample stream that are never read.
        requests: Requests to drop that were already turned into ranges; a resume must not turn them twice.
        reshuffles: (stream position, key) of each new order of what was still to be read, oldest first.
        restored: By name, what is called when the counters were restored: the training loader is not made yet.
        start: The counters when the open window began: what the learning rate of this step is a function of.
        held: Of the counters, the windows over which the schedule was held: steps that were skipped, if so chosen.
        rows_per_sample: Rows of a batch that make up one sample of the stream; above 1 where samples were cut up.
        ranks: Agrees with the other ranks on the host; closed where there are none, or batches are alike on all.
        full_length: Positions of a sample before it was shortened; ``None`` where nothing shortens them.

    Args:
        samples: Samples consumed by earlier training whose checkpoint has no counters of ours; ``None``: inferred.
        tokens: Tokens, likewise.

    Raises:
        MisconfigurationException: when a checkpoint of a begun run has no counters and they can be neither inferred nor
            were given here; when the counters were installed after the checkpoint was restored; when a callback with
            state has trained with another trainer and begins a new run; when the optimizer is stepped without
            Lightning, or ``training_step`` takes its batches itself (``dataloader_iter``).

    Example::

        >>> Trainer(callbacks=[Progress()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 0

    def __init__(self, samples: int | None = None, tokens: int | None = None) -> None:
        self._given = (samples, tokens)
        self._uncounted: UncountedRun | None = None
        self._raw_steps = RawSteps()
        self.steps = 0
        self._samples = 0
        self._was_asked = False  # for the samples, since they were restored
        self.tokens = 0
        self.dropped: list[Range] = []
        self.requests: list[str] = []
        self.reshuffles: list[tuple[int, int]] = []
        self.restored: dict[str, Callable[[], None]] = {}
        self._skipped = SkippedSteps()
        self.start = Mark(0, 0, 0)
        self._before_evaluation: dict[str, Any] | None = None
        self.held = Mark(0, 0, 0)
        self.rows_per_sample = 1
        self.full_length: int | None = None
        self.ranks = HostAgreement()
        self._window = OpenWindow(self.ranks)
        self._replayed = 0  # micro-batches of the window in which the checkpoint was written

    @staticmethod
    def of(trainer: Trainer) -> Progress:
        """The trainer's counters, installed if it has none yet."""
        return find_or_install(trainer, Progress)

    @property
    def samples(self) -> int:
        """Samples consumed by committed steps; never advances over dropped data."""
        if self._uncounted is not None and self._uncounted.samples is None:
            raise self._uncounted.unknown("the training loader is made from it")
        self._was_asked = True
        return self._samples

    @samples.setter
    def samples(self, value: int) -> None:
        self._samples = value

    @property
    def position(self) -> int:
        """Stream index of the next sample: a function of what was consumed and what is dropped."""
        return stream_position(self.samples, self.dropped)

    @property
    def pending_samples(self) -> int:
        """Samples of the open window that were begun and not yet committed."""
        return self._window.samples

    @property
    def skipped(self) -> int:
        """Optimizer steps that changed nothing. Reading it waits for the device when a step was judged there."""
        return self._skipped.total()

    @property
    def skipped_last(self) -> bool:
        """Whether the last optimizer step changed nothing, whoever skipped it. Reading it waits likewise."""
        return self._skipped.last()

    def skipped_on(self, device: torch.device) -> Tensor:
        """Their count as a 0-d tensor on a device, without a wait if that is where steps are judged."""
        return self._skipped.on(device)

    def skipped_last_on(self, device: torch.device) -> Tensor:
        """Whether the last step changed nothing, as a 0-d bool tensor on a device; no wait, as above."""
        return self._skipped.last_on(device)

    @property
    def applied(self) -> int:
        """Optimizer steps that moved the weights: what Adam's step count must equal."""
        return self.steps - self.skipped

    @property
    def mark(self) -> Mark:
        """The committed counters now."""
        return Mark(self.steps, self.samples, self.tokens)

    @property
    def scheduled(self) -> Mark:
        """``start`` less ``held``: where a schedule that is a function of progress stands in the open window."""
        return Mark(*(counted - held for counted, held in zip(self.start, self.held, strict=True)))

    def note_held(self, window: Mark) -> None:
        """Hold the schedule over a window of so many steps, samples and tokens."""
        self.held = Mark(*(held + more for held, more in zip(self.held, window, strict=True)))

    def note_skipped(self, flag: Tensor | bool) -> None:
        """Add one skipped step if ``flag`` (a 0-d tensor is summed on its device, without a host sync)."""
        self._skipped.note(flag)

    def drop(self, ranges: list[Range], request: str) -> None:
        """Never read these stream ranges, and remember the request that asked for it."""
        self.dropped = merge_ranges([*self.dropped, *ranges])
        self.requests.append(request)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":  # an evaluation loads the counters of its checkpoint, which are not those of this trainer
            self._before_evaluation = self.state_dict()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._raw_steps.release()
        self._skipped.release()
        self.ranks.close()
        if stage != "fit" and self._before_evaluation is not None:
            self.load_state_dict(self._before_evaluation)
        self._before_evaluation = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begun_fit.refuse_state_of_another_run(trainer)
        if not self.steps:
            begun_fit.refuse_counters_that_came_too_late(trainer)
        if self._uncounted is not None:
            self.samples = self._uncounted.infer_samples(trainer, pl_module)
        elif self.steps and not self._was_asked:
            begun_fit.tell_of_a_loader_that_begins_anew(trainer, self._samples)
        begun_fit.mend_place_in_epoch(trainer, self._replayed)
        self._replayed = 0
        self._raw_steps.watch(trainer, pl_module)
        self._skipped.watch(trainer, pl_module)
        self._window.begin_fit(trainer, pl_module)
        self.start = self.mark

    def drop_window(self) -> None:
        self._window.clear()
        self.start = self.mark

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch is None:
            raise begun_fit.batches_taken_elsewhere(pl_module)
        self._raw_steps.begin_batch(trainer)
        samples, tokens = getattr(pl_module, "count_batch", samples_and_tokens)(batch)
        samples //= self.rows_per_sample
        if self._uncounted is not None:
            each = self.full_length or tokens // samples
            tokens_before = self._uncounted.infer_tokens(samples, each, trainer.is_last_batch)
            self.tokens, self._uncounted = self.ranks.from_rank_0(tokens_before), None
        if not self._window.batches:
            self.start = self.mark
        self._window.add(samples, tokens)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._window.has_loss = True
        if pl_module.automatic_optimization and not window_is_open(trainer):
            self._window.begin_sums()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self._window.batches:  # a second optimizer stepping on the same batch
            return
        # Lightning steps, and counts the step, also when `training_step` returned None for the whole window.
        self._commit(skipped=pl_module.automatic_optimization and not self._window.has_loss)

    def _commit(self, skipped: bool) -> None:
        self._skipped.begin_step()
        self.note_skipped(skipped)
        samples, tokens = self._window.over_ranks()
        self.steps += 1
        self._samples += samples
        self.tokens += tokens
        self._window.clear()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._raw_steps.refuse(trainer, pl_module)
        if self._window.batches and pl_module.automatic_optimization and not window_is_open(trainer):
            self._commit(skipped=True)  # Lightning counts the step as well
        self._skipped.end_step()
        # After the step, so that one that was skipped is counted in its own row.
        if self._window.batches or not is_logging_step(trainer):
            return
        for name, value in (("samples", self._samples), ("tokens", self.tokens), ("skipped", self._skipped.count)):
            pl_module.log(f"progress/{name}", torch.as_tensor(value, dtype=torch.float64))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        restored = self.state_key in checkpoint.get("callbacks", {})
        if restored or not checkpoint.get("global_step") or trainer.state.fn != "fit":
            return
        self.steps = int(checkpoint["global_step"])
        self._uncounted = UncountedRun(self.steps, *self._given, checkpoint)
        self._was_asked = False
        self._tell_restored()

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "skipped_last": self.skipped_last,
            "samples": self.samples,
            "tokens": self.tokens if self._uncounted is None else self._uncounted.tokens,
            "dropped": [list(r) for r in self.dropped],
            "requests": list(self.requests),
            "reshuffles": [list(r) for r in self.reshuffles],
            "held": list(self.held),
            "open": self._window.batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = int(state_dict["steps"])
        self._skipped.set(int(state_dict["skipped"]), bool(state_dict.get("skipped_last")))
        self.samples = int(state_dict["samples"])
        self.tokens = int(state_dict["tokens"] or 0)
        self._uncounted = None
        if state_dict["tokens"] is None:  # saved before the first batch of a run that nobody had counted
            self._uncounted = UncountedRun(self.steps, self._samples, None)
        self.dropped = merge_ranges(state_dict["dropped"])
        self.requests = [str(r) for r in state_dict["requests"]]
        self.reshuffles = [(int(p), int(k)) for p, k in state_dict.get("reshuffles", [])]
        self.held = Mark(*(int(n) for n in state_dict.get("held", (0, 0, 0))))
        self._replayed = int(state_dict.get("open", 0))
        self._window.clear()
        self.start = self.mark
        self._tell_restored()
        self._was_asked = False

    def _tell_restored(self) -> None:
        for _, function in sorted(self.restored.items()):
            function()
