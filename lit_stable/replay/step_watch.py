"""What a replay computes in each step, and all about the one that is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_stable.callbacks import GradNorm, Progress
from lit_stable.callbacks.base import StabilityCallback
from lit_stable.callbacks.rank_gather import gather_objects
from lit_stable.callbacks.sample_places import sample_places
from lit_stable.callbacks.sample_text import find_tokenizer
from lit_stable.replay.module_outputs import ModuleOutputs, merged

#: What is compared with the run's log, by its name there.
LOSS, NORM = "train/loss", "stability/grad_norm"


@dataclass
class Replayed:
    """What one replay came to."""

    values: dict[str, dict[int, float]] = field(default_factory=lambda: {LOSS: {}, NORM: {}})
    """By name in the log, by step."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of the step asked for: mean loss of each sample, by stream index."""
    texts: dict[int, str] = field(default_factory=dict)
    """Likewise what it says."""
    outputs: dict[int, dict[str, dict[int, float]]] = field(default_factory=dict)
    """Of that step and the one before: see :class:`ModuleOutputs`."""
    ranks: int = 1
    compiled: bool = False
    """Then no module inside of the network was looked at."""
    error: str = ""
    """What ended it early."""


class StepWatch(StabilityCallback):
    """Record; waits for the device in every step. Nothing is logged.

    Args:
        step: The optimizer step asked for, counted from 1.
    """

    order: ClassVar[int] = 57

    def __init__(self, step: int) -> None:
        self.step = step
        self.found = Replayed()
        self._outputs: ModuleOutputs | None = None
        self._samples: list[int] = []
        self._tokens: list[list[int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.found.compiled = pl_module.compiled != "off"

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = Progress.of(trainer).steps + 1
        if self.found.compiled:  # within compiled code no module's hooks run
            return
        if self._outputs is None and step in (self.step - 1, self.step):
            self._outputs = ModuleOutputs(pl_module)
        if self._outputs is None:
            return
        rows = len(batch["input_ids"])
        places = sample_places(trainer, pl_module, batch)
        self._samples = [places[row * len(places) // rows] for row in range(rows)]  # a sample may be several rows
        self._tokens = batch["input_ids"].tolist() if step == self.step else []
        self._outputs.begin(self._samples)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._outputs is None:
            return
        self._outputs.end()
        if self._tokens:
            self._note_losses(trainer, pl_module)

    def _note_losses(self, trainer: Trainer, module: Any) -> None:
        sums, counts, _ = module.sample_losses
        tokenizer = find_tokenizer(trainer, module)
        means = (sums / counts.clamp(min=1)).tolist()
        for sample, mean, tokens in zip(self._samples, means, self._tokens, strict=True):
            self.found.losses[sample] = mean
            self.found.texts[sample] = str(tokens) if tokenizer is None else str(tokenizer.decode(tokens))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        steps, norm = Progress.of(trainer).steps, GradNorm.of(trainer).value
        assert norm is not None
        self.found.values[NORM][steps] = float(norm)
        if self._outputs is not None:
            self.found.outputs[steps] = self._outputs.seen
            self._outputs.remove()
            self._outputs = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._note_loss(trainer, pl_module)

    def handle_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._note_loss(trainer, pl_module)

    def _note_loss(self, trainer: Trainer, module: Any) -> None:
        progress = Progress.of(trainer)
        if (
            not progress.pending_samples
            and module.window_loss is not None
            and progress.steps in self.found.values[NORM]
        ):
            self.found.values[LOSS][progress.steps] = float(module.window_loss)

    def gather(self) -> Replayed:
        """With what the other ranks have seen of their samples. A collective: all ranks call it."""
        parts = gather_objects(self.found)
        for part in parts:
            self.found.losses.update(part.losses)
            self.found.texts.update(part.texts)
        steps = {step for part in parts for step in part.outputs}
        self.found.outputs = {step: merged([part.outputs.get(step, {}) for part in parts]) for step in steps}
        self.found.ranks = len(parts)
        return self.found
