"""The one owner of how far a run has come: steps, samples, tokens, and what was dropped or skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .base import MisconfigurationException, StabilityCallback, find_or_install, was_logging_step
from .positions import Range, merge_ranges, stream_position
from .topology import data_parallel_size

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
    any save. Micro-batches of a window that has not stepped are *pending* and not part of the state; a resume replays
    that window. So a checkpoint may be written at any moment.

    Samples are counted over all data-parallel ranks (not the world size: tensor-parallel ranks see the same samples).
    A batch holds ``shape[0]`` samples and ``shape[0] * shape[1]`` tokens of its first tensor; a LightningModule that
    knows better defines ``count_batch(batch) -> tuple[int, int]`` (samples, tokens of this rank's batch).

    It installs itself: any callback or data module calls ``Progress.of(trainer)`` in its ``setup``.

    Logged at logging steps: ``progress/samples``, ``progress/tokens``, ``progress/skipped`` (the counters after the
    step).

    Attributes:
        steps: Optimizer steps committed, skipped ones included.
        samples: Samples consumed by committed steps; never advances over dropped data.
        tokens: Tokens consumed by committed steps.
        dropped: Sorted ``[start, stop)`` ranges of the sample stream that are never read.
        requests: Requests to drop that were already turned into ranges; a resume must not turn them twice.
        start: The counters when the open window began: what the learning rate of this step is a function of.
        held: Of the counters, the windows over which the schedule was held: steps that were skipped, if so chosen.
        rows_per_sample: Rows of a batch that make up one sample of the stream; above 1 where samples were cut up.

    Args:
        samples: Samples consumed by earlier training whose checkpoint has no counters of ours; ``None``: none.
        tokens: Tokens, likewise.

    Raises:
        MisconfigurationException: when a checkpoint of a begun run has no counters and none were given here, or when
            the counters were installed after the checkpoint was restored, or have counted for another trainer.

    Example::

        >>> Trainer(callbacks=[Progress()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 0

    def __init__(self, samples: int | None = None, tokens: int | None = None) -> None:
        self._given = (samples, tokens)
        self.steps = 0
        self.samples = 0
        self.tokens = 0
        self.dropped: list[Range] = []
        self.requests: list[str] = []
        self._skipped: int | Tensor = 0
        self.start = Mark(0, 0, 0)
        self._before_evaluation: dict[str, Any] | None = None
        self.held = Mark(0, 0, 0)
        self.rows_per_sample = 1
        self._pending_samples = 0
        self._pending_tokens = 0
        self._has_loss = False  # of the open window: did any micro-batch have one?

    @staticmethod
    def of(trainer: Trainer) -> Progress:
        """The trainer's counters, installed if it has none yet."""
        return find_or_install(trainer, Progress)

    # -- what others read --------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Stream index of the next sample: a function of what was consumed and what is dropped."""
        return stream_position(self.samples, self.dropped)

    @property
    def pending_samples(self) -> int:
        """Samples of the open window that were begun and not yet committed."""
        return self._pending_samples

    @property
    def skipped(self) -> int:
        """Optimizer steps that changed nothing. Reading it waits for the device when a step was judged there."""
        if isinstance(self._skipped, Tensor):
            self._skipped = int(self._skipped.item())
        return self._skipped

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
        if isinstance(flag, Tensor):
            earlier = self._skipped if isinstance(self._skipped, Tensor) else 0 * flag.long() + self._skipped
            self._skipped = earlier.to(flag.device) + flag.long()
        elif flag:
            self._skipped = self.skipped + 1

    def drop(self, ranges: list[Range], request: str) -> None:
        """Never read these stream ranges, and remember the request that asked for it."""
        self.dropped = merge_ranges([*self.dropped, *ranges])
        self.requests.append(request)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":  # an evaluation loads the counters of its checkpoint, which are not those of this trainer
            self._before_evaluation = self.state_dict()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" and self._before_evaluation is not None:
            self.load_state_dict(self._before_evaluation)
        self._before_evaluation = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step and not self.steps:
            raise MisconfigurationException(
                f"`Progress` begins at 0 and the trainer stands at step {trainer.global_step} already: it was installed"
                " too late to be restored; put `Progress()` into the trainer's callbacks."
            )
        if self.steps and not trainer.global_step:
            raise MisconfigurationException(
                f"`Progress` stands at step {self.steps} and the trainer at 0: it has counted for another trainer; give"
                " each one its own `Progress()`."
            )
        self._pending_samples = self._pending_tokens = 0
        self._has_loss = False
        self.start = self.mark

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._pending_samples == 0:
            self.start = self.mark
        count = getattr(pl_module, "count_batch", count_first_tensor)
        samples, tokens = count(batch)
        ranks = data_parallel_size(trainer)
        self._pending_samples += samples // self.rows_per_sample * ranks
        self._pending_tokens += tokens * ranks

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._has_loss = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._pending_samples == 0:  # a second optimizer stepping on the same batch
            return
        # Lightning steps, and counts the step, also when `training_step` returned None for the whole window.
        self.note_skipped(pl_module.automatic_optimization and not self._has_loss)
        self._has_loss = False
        self.steps += 1
        self.samples += self._pending_samples
        self.tokens += self._pending_tokens
        self._pending_samples = self._pending_tokens = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # After the step, so that one that was skipped is counted in its own row.
        if self._pending_samples or not was_logging_step(trainer):
            return
        for name, value in (("samples", self.samples), ("tokens", self.tokens), ("skipped", self._skipped)):
            pl_module.log(f"progress/{name}", torch.as_tensor(value, dtype=torch.float64))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        restored = self.state_key in checkpoint.get("callbacks", {})
        if restored or not checkpoint.get("global_step") or trainer.state.fn != "fit":
            return
        samples, tokens = self._given
        if samples is None or tokens is None:
            raise MisconfigurationException(
                f"checkpoint at step {checkpoint['global_step']}: was written without `Progress`, so the samples and"
                " tokens it consumed are unknown; give them as `Progress(samples=..., tokens=...)`."
            )
        self.steps, self.samples, self.tokens = int(checkpoint["global_step"]), samples, tokens

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "samples": self.samples,
            "tokens": self.tokens,
            "dropped": [list(r) for r in self.dropped],
            "requests": list(self.requests),
            "held": list(self.held),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = int(state_dict["steps"])
        self._skipped = int(state_dict["skipped"])
        self.samples = int(state_dict["samples"])
        self.tokens = int(state_dict["tokens"])
        self.dropped = merge_ranges(state_dict["dropped"])
        self.requests = [str(r) for r in state_dict["requests"]]
        self.held = Mark(*(int(n) for n in state_dict.get("held", (0, 0, 0))))
        self._pending_samples = self._pending_tokens = 0
        self.start = self.mark


def count_first_tensor(batch: Any) -> tuple[int, int]:
    """(samples, tokens) of a batch by its first tensor of shape (B, T, ...); ``T`` counts as 1 for shape (B,).

    Raises:
        MisconfigurationException: when the batch holds no tensor.
    """
    tensor = _first_tensor(batch)
    if tensor is None:
        raise MisconfigurationException(
            f"batch of type {type(batch).__name__}: holds no tensor to count samples by; define"
            " `count_batch(batch) -> (samples, tokens)` on the LightningModule."
        )
    samples = tensor.shape[0] if tensor.ndim else 1
    return samples, samples * (tensor.shape[1] if tensor.ndim > 1 else 1)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((t for t in map(_first_tensor, parts) if t is not None), None)
