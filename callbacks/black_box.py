"""The last steps of a run, kept at hand, and written down when something happens."""

from __future__ import annotations

import json
import shutil
from collections import deque
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .base import MisconfigurationException, StabilityCallback, rank_zero_warn, refuse_all
from .black_box_row import DeviceRing, HostRow, as_record, texts
from .events import Event, Events
from .grad_norm import GradNorm
from .learning_rate import EffectiveLR
from .parameter_places import layer_of
from .plain_values import plain
from .progress import Progress
from .sample_places import sample_places
from .sample_text import find_tokenizer
from .token_statistics import token_ids
from .window_loss import WindowLoss
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

FOLDER = "blackbox"


class BlackBox(StabilityCallback):
    """Keep the last ``steps`` optimizer steps and write them down when an event happens or the fit fails.

    Of each step: the loss of this rank, the gradient norm, the gradient norm of each layer (all before clipping,
    without the loss scale), the learning rate that was used, the stream indices of the samples, the seed of torch's
    generator before every micro-batch, what other callbacks say is ``in_force`` (clipping level, spike limit and
    score), and whether the step was skipped, whoever did (see :class:`~.progress.Progress`). What is not known of a
    step is left out, as that of one that failed. Of the newest ``text_steps`` also the token ids, and so the text.

    The numbers stay on the device, in a ring; **no step waits for it**. They are read when they are written down: to
    ``blackbox/step-NNNNNNNN-KIND/rankR.json`` in the folder of :class:`~.events.Events`, with the event, its evidence
    and one record per step, newest last; the text of the samples to ``rankR.txt`` beside it. Every rank writes its own,
    without talking to others, so that one that fails alone leaves its record too. An event of one rank is written by
    that rank. A kind that comes again within ``steps`` steps is not written again.

    Where the tokenizer is: :class:`~.sample_text.SampleText`. Without one the ids are written.

    Costs: one norm per parameter a step, and where parameters are sharded one collective of one number per parameter
    (shared with clipping by parts). Memory: token ids of ``text_steps`` steps stay on the device.

    Nothing is logged. Nothing is saved: after a resume it begins empty.

    Args:
        steps: Steps that are kept, >= 1.
        text_steps: Of how many of those the tokens are kept, >= 0. Decisions on CUDA are known 4
            steps late.
        kinds: Which kinds of event, as shell patterns separated by blanks; ``*`` for all.
        keep: How many folders stay, >= 1; those written first go.

    Raises:
        MisconfigurationException: when a number is out of range.

    Example::

        >>> Trainer(callbacks=[BlackBox(steps=128)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 56  # after what decides and what tells of it

    def __init__(self, steps: int = 64, text_steps: int = 8, kinds: str = "*", keep: int = 20) -> None:
        refuse_all(
            f"`BlackBox({name}={value})`: must be {rule}."
            for name, value, least, rule in (
                ("steps", steps, 1, "at least 1"),
                ("text_steps", text_steps, 0, "0 or more"),
                ("keep", keep, 1, "at least 1"),
            )
            if value < least
        )
        self.steps, self.text_steps, self.kinds, self.keep = steps, text_steps, kinds, keep
        self._ring = DeviceRing(steps)
        self._rows: deque[HostRow] = deque(maxlen=steps)
        self._open = HostRow()
        self._loss = WindowLoss()
        self._due: list[Event] = []
        self._written: dict[str, int] = {}  # step at which a kind was written last
        #: By the identity of the optimizer: the names of its layers, and the layer of each parameter.
        self._layers: dict[int, tuple[list[str], Tensor]] = {}
        self._measured = 0  # the last step that an optimizer began
        self._has_tokens = True
        self._taken = 0  # optimizer steps, by Lightning's count, when the micro-batch began
        self._warned = False

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        GradNorm.of(trainer)
        Progress.of(trainer)
        Events.of(trainer).listeners["black_box"] = self._hear

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ring.clear()
        self._rows.clear()
        self._loss.clear()
        self._due, self._written, self._layers, self._open = [], {}, {}, HostRow()
        self._measured = 0
        self._has_tokens = self.text_steps > 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._taken = trainer.global_step
        self._open.samples += sample_places(trainer, pl_module, batch)
        self._open.seeds.append(torch.initial_seed())
        if not self._has_tokens:
            return
        try:
            self._open.tokens.append(token_ids(batch, pl_module))
        except MisconfigurationException:  # no text; the numbers are worth having all the same
            self._has_tokens = False

    def drop_window(self) -> None:
        self._loss.clear()
        self._open = HostRow()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss.add(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        steps = Progress.of(trainer).steps
        # Of several that step together the first in the trainer's list tells, of those that take turns each.
        if steps == self._measured and optimizer is not trainer.optimizers[0]:
            return
        self._measured = steps
        norm = GradNorm.of(trainer)
        assert norm.value is not None
        values: dict[str, Tensor | float] = {} if self._loss.is_empty else {"loss": self._loss.own(trainer)}
        values.update(grad_norm=norm.value)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "in_force"):
                values.update(callback.in_force())
        self._open.lr = float(optimizer.param_groups[0]["lr"]) if _on_host(optimizer) else 0.0
        self._ring.write(steps, values, self._layer_norms(norm, pl_module, optimizer))
        self._loss.clear()

    def _layer_norms(self, norm: GradNorm, module: LightningModule, optimizer: Any) -> tuple[list[str], Tensor]:
        each = norm.measure_each(optimizer)
        if id(optimizer) not in self._layers:
            names = {p: layer_of(unwrapped(name)) for name, p in module.named_parameters()}
            layers = [names.get(p, "others") for group in optimizer.param_groups for p in group["params"]]
            unique = list(dict.fromkeys(layers))
            places = torch.tensor([unique.index(layer) for layer in layers], device=each.device)
            self._layers[id(optimizer)] = [f"grad_norm/{layer}" for layer in unique], places
        names_, places = self._layers[id(optimizer)]
        squares = torch.zeros(len(names_), device=each.device).index_add_(0, places, each.square())
        return names_, squares.sqrt()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        steps = Progress.of(trainer).steps
        if self._open.samples and not Progress.of(trainer).pending_samples:
            self._note_end(trainer, steps)
            self._close(trainer, steps)
        while self._due:
            self._write(trainer, pl_module, self._due.pop(0))

    def _note_end(self, trainer: Trainer, steps: int) -> None:
        """Keep what is known of a step when it has been taken: at its begin a scaler has not yet looked at it."""
        device = self._ring.device or trainer.strategy.root_device
        self._ring.put(steps, "skipped", Progress.of(trainer).skipped_last_on(device))
        self._loss.clear()  # where the module has withheld the step, nobody has asked for it

    def _close(self, trainer: Trainer, steps: int) -> None:
        used = next((c.used for c in trainer.callbacks if isinstance(c, EffectiveLR)), {})  # type: ignore[attr-defined]
        self._open.step, self._open.lr = steps, used["lr"][0] if used else self._open.lr
        self._rows.append(self._open)
        self._open = HostRow()
        if len(self._rows) > self.text_steps:
            self._rows[-1 - self.text_steps].tokens = []

    # -- writing -----------------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        if not any(fnmatchcase(event.kind, pattern) for pattern in self.kinds.split()):
            return
        last = self._written.get(event.kind)
        if last is None or not 0 <= event.step - last < self.steps:
            self._written[event.kind] = event.step
            self._due.append(event)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self._due:
            self._write(trainer, pl_module, self._due.pop(0))

    def handle_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception):
            if self._open.samples:  # the step that failed is the one to look at
                progress = Progress.of(trainer)
                if trainer.global_step > self._taken:
                    with suppress(RuntimeError):  # a device that is gone
                        self._note_end(trainer, progress.steps)
                self._close(trainer, progress.steps + (progress.pending_samples > 0))
            evidence = {"error": type(exception).__name__, "text": str(exception)[:1000]}
            step = self._rows[-1].step if self._rows else 0
            for event in [*self._due, Event(step, "exception", evidence, rank=trainer.global_rank)]:
                self._write(trainer, pl_module, event)

    def _write(self, trainer: Trainer, module: LightningModule, event: Event) -> None:
        try:
            home = (Events.of(trainer).folder or Path(trainer.default_root_dir)) / FOLDER
            folder = home / f"step-{event.step:08d}-{event.kind}"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank{trainer.global_rank}.json"
            found = {"step": event.step, "kind": event.kind, "evidence": event.evidence}
            # Written row by row, so that a person can read it.
            rows = ",\n".join(json.dumps(plain(record)) for record in self._records())
            path.write_text(f'{{"event": {json.dumps(plain(found))},\n"steps": [\n{rows}\n]}}\n')
            if said := texts(self._rows, find_tokenizer(trainer, module)):
                path.with_suffix(".txt").write_text(said)
            if trainer.is_global_zero:
                # By time, not by step: behind a rewind, or a resume from an earlier step, the newest has a lower one.
                others = sorted((path for path in home.iterdir() if path != folder), key=_written_at)
                for old in others[: max(0, len(others) + 1 - self.keep)]:
                    shutil.rmtree(old, ignore_errors=True)
        except (OSError, RuntimeError) as error:  # a disk that is full, a device that is gone: both have been told
            if not self._warned:
                rank_zero_warn(f"BlackBox: was not written: {error}")
            self._warned = True

    def _records(self) -> list[dict[str, Any]]:
        records = []
        for row in self._rows:
            try:
                numbers = self._ring.read(row.step)
            except RuntimeError as error:  # what the host knows is left, where the device has failed
                numbers = {}
                rank_zero_warn(f"BlackBox: the device cannot be read: {error}")
            records.append(as_record(row, numbers))
        return records

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        Events.of(trainer).listeners.pop("black_box", None)
        self._ring.clear()
        self._rows.clear()
        self._layers, self._open = {}, HostRow()


def _written_at(folder: Path) -> tuple[int, str]:
    # Of its files too: one that is written over, behind a rewind, leaves the time of its folder. And the name, where a
    # file system's clock is coarse.
    return max(path.stat().st_mtime_ns for path in (folder, *folder.glob("*"))), folder.name


def _on_host(optimizer: Any) -> bool:
    return not isinstance(optimizer.param_groups[0]["lr"], Tensor)
