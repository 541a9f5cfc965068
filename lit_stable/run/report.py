"""What a person sees of a run: the first lines, one line per logging interval, and a closing table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_stable.callbacks import EffectiveLR, GradNorm, Progress
from lit_stable.callbacks.interval_clock import IntervalClock
from lit_stable.callbacks.late_reads import LateReads
from lit_stable.callbacks.whole_file import write_whole
from lit_stable.module import GPTModule, is_reported_step
from lit_stable.optim.schedule import format_lr
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.console import human_bytes, human_count, say
from lit_stable.run.full_disk import on_rank_zero
from lit_stable.run.start import first_lines, measured_init, session_of, whole_parameters


class Report(Callback):
    """Prints; changes nothing. Tokens/s count training time only, over the interval of the line they stand in.

    Args:
        resume_command: What the closing table names as the way to go on.
        notes: What stands before the first lines: how the recipe came to be.
    """

    def __init__(self, resume_command: str, notes: Sequence[str] = ()) -> None:
        self.resume_command = resume_command
        self.notes = list(notes)
        self.first_loss = float("nan")  # of the run, also after a resume
        self.first_step: int | None = None
        self._last_loss = float("nan")
        self._last_step: int | None = None
        self._validated: int | None = None  # after which step
        self._is_finite = True
        self._began = time.perf_counter()  # the recipe has just been read
        self._to_first_line: float | None = None  # seconds, with whatever is compiled on the way
        self.started = False
        self._clock = IntervalClock()
        self._seen = 0

    # -- first lines -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        progress = Progress.of(trainer)
        self.started = True
        self._seen = progress.steps
        self._clock.start(progress.tokens)
        session = session_of(trainer)
        callbacks = [c for c in trainer.callbacks if c not in (self, session)]  # type: ignore[attr-defined]
        with whole_parameters(trainer):
            lines = [*self.notes, *first_lines(trainer, pl_module, callbacks)]
            if progress.steps == 0:  # after a resume the weights are trained ones
                lines.append(measured_init(pl_module))
        for line in [*lines, ""]:
            say(line)
        if session is not None and session.folder is not None:
            path = session.folder / f"start-{session.number:02d}.txt"
            on_rank_zero(trainer, session.folder, lambda: write_whole(path, "\n".join(lines) + "\n"))

    # -- lines -------------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, GPTModule)
        progress = Progress.of(trainer)
        if progress.steps == self._seen:  # in mid-window
            return
        self._seen = step = progress.steps
        if not is_reported_step(trainer, step):
            return
        assert pl_module.window_loss is not None
        found = {"loss": pl_module.window_loss, "skipped": progress.skipped_on(pl_module.device)}
        if (norm := GradNorm.of(trainer).value) is not None:
            found["norm"] = norm
        lr, tokens = format_lr(effective_lr(trainer)), progress.tokens
        of = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""

        def tell(numbers: list[float]) -> None:
            self._tell(step, of, lr, tokens, dict(zip(found, numbers, strict=True)))

        row = torch.stack([value.to(pl_module.device, torch.float64) for value in found.values()])
        LateReads.of(trainer).read(row, tell)

    def _tell(self, step: int, of: str, lr: str, tokens: int, read: dict[str, float]) -> None:
        if self._to_first_line is None:
            self._to_first_line = time.perf_counter() - self._began
        was_finite, self._last_loss, self._last_step = self._is_finite, read["loss"], step
        self._is_finite = math.isfinite(self._last_loss)
        if was_finite and not self._is_finite:
            say(f"step {step}: the loss is {self._last_loss}; checkpoints saved before it are kept from here on.")
        if math.isnan(self.first_loss):
            self.first_loss, self.first_step = self._last_loss, step
        parts = [
            f"step {step}{of}",
            f"loss {self._last_loss:.4f}",
            f"lr {lr}",
            *([f"grad norm {read['norm']:.3g}"] if "norm" in read else []),
            f"{human_count(self._clock.interval(tokens))} tokens/s",  # the device is done with the step by now
            f"{human_count(tokens)} tokens",
            *([f"{int(read['skipped'])} skipped"] if read["skipped"] else []),
        ]
        say(" | ".join(parts))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.go_on()
        if trainer.sanity_checking:
            return
        self._validated = Progress.of(trainer).steps
        for name, loss in validation_losses(trainer).items():
            say(f"  validation {name}: loss {loss:.4f}, perplexity {torch.tensor(loss).exp():.4g}")

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    # -- closing table -----------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):
                callback.finish(trainer)  # what the table names is on disk
        progress, data = Progress.of(trainer), trainer.datamodule  # type: ignore[attr-defined]
        rows = [
            ("steps", f"{progress.steps} ({progress.skipped} skipped)"),
            ("tokens", f"{progress.tokens:,}"),
            ("tokens/s", human_count(self._clock.overall(progress.tokens))),
            *([] if self._to_first_line is None else [("to the first line", f"{self._to_first_line:.1f} s")]),
            (
                "loss, first and last",
                f"{_at(self.first_loss, self.first_step)} -> {_at(self._last_loss, self._last_step)}",
            ),
        ]
        for name, loss in validation_losses(trainer).items():
            entropy = data.unigram_entropy(name)
            verdict = "below" if loss < entropy else "NOT BELOW"
            rows.append(
                (f"validation {name}", f"{_at(loss, self._validated)}, {verdict} the unigram entropy {entropy:.4f}")
            )
        if trainer.strategy.root_device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(trainer.strategy.root_device)
            rows.append(("peak memory, rank 0", human_bytes(peak)))
        session = session_of(trainer)
        if session is not None:
            rows.append(("logs", str(session.folder)))
        for callback in trainer.checkpoint_callbacks:
            if stalls := getattr(callback, "stalls", []):
                rows.append(
                    ("saving took", f"{sum(stalls):.1f} s for {len(stalls)} checkpoint{'s' if len(stalls) > 1 else ''}")
                )
            for what in ("last", "best"):
                if hasattr(callback, what) and (path := getattr(callback, what)()) is not None:
                    rows.append((f"checkpoint, {what}", str(path)))
        rows.append(("to go on", self.resume_command))
        width = max(len(name) for name, _ in rows)
        say("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows))

    def state_dict(self) -> dict[str, Any]:
        return {"first_loss": self.first_loss, "first_step": self.first_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first_loss, self.first_step = state_dict["first_loss"], state_dict.get("first_step")


def _at(loss: float, step: int | None) -> str:
    return f"{loss:.4f}" if step is None else f"{loss:.4f} at step {step}"


def effective_lr(trainer: Trainer) -> float:
    """The learning rate that the step just taken used in the first group, with what callbacks changed of it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EffectiveLR) and callback.used:
            return float(callback.used["lr"][0])
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def validation_losses(trainer: Trainer) -> dict[str, float]:
    """Loss of each named validation set as last measured; empty before the first validation."""
    names = getattr(trainer.datamodule, "validation_names", [])  # type: ignore[attr-defined]
    found = {name: trainer.callback_metrics.get(f"val/{name}/loss") for name in names}
    return {name: float(loss) for name, loss in found.items() if loss is not None}
