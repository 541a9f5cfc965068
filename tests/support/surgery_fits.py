"""A run of three steps, and what goes on from it with norms that it had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from tiny_gpt_run import Fit, SaveEveryMicroBatch, fit, whole_weights

from lit_stable.callbacks import EffectiveLR
from lit_stable.model.insertion import Insertion
from lit_stable.run.surgery import Surgery, SurgeryOptions

NORMS: dict[str, Any] = {"qk_norm": "layernorm", "embed_norm": True, "bias": True}
BOTH: list[Insertion] = ["qk_norm", "embed_norm"]
NEW = ("embed_norm", "q_norm", "k_norm")
RISE = 4
BEFORE, WITHIN, END = 3, 5, 7  # steps


class Look(Callback):
    """Weights and moments as the run goes on, and the factor on the rate of every step."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}
        self.factors: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.weights:
            return
        self.weights = whole_weights(pl_module)
        state = trainer.optimizers[0].state
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        for parameter, values in state.items():
            moment = values["exp_avg_sq"]
            whole = moment.full_tensor() if hasattr(moment, "full_tensor") else moment
            self.moments[names[parameter]] = whole.detach().cpu().clone()
            self.counts[names[parameter]] = int(values["step"])

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        effective = next((c for c in trainer.callbacks if isinstance(c, EffectiveLR)), None)  # type: ignore[attr-defined]
        if effective is not None and effective.used:
            self.factors.append(effective.used["lr"][0] / effective.own["lr"][0])


def before(folder: Path, strategy: str = "auto", **options: Any) -> Path:
    """The checkpoint of a run without the norms, behind its third step."""
    batches = 4 * BEFORE // _ranks(options)
    saves = SaveEveryMicroBatch(folder, only=(batches,))
    fit(strategy, steps=BEFORE, callbacks=(saves,), bias=True, **options)
    return folder / f"m{batches}.ckpt"


def operated(
    checkpoint: Path,
    strategy: str = "auto",
    options: SurgeryOptions | None = None,
    folder: Path | None = None,
    steps: int = END,
    **more: Any,
) -> tuple[Fit, Look]:
    """Go on from a checkpoint, with the norms."""
    look = Look()
    options = options or SurgeryOptions(BOTH, rewarmup=RISE)
    saves = [] if folder is None else [SaveEveryMicroBatch(folder, only=(4 * (WITHIN - BEFORE) // _ranks(more),))]
    callbacks = (Surgery(options), look, *saves)
    return fit(strategy, steps=steps, ckpt_path=checkpoint, callbacks=callbacks, **{**NORMS, **more}), look


def within(folder: Path, **options: Any) -> Path:
    """The checkpoint that ``operated`` has left in the middle of the rise."""
    return folder / f"m{4 * (WITHIN - BEFORE) // _ranks(options)}.ckpt"


def _ranks(options: dict[str, Any]) -> int:
    return int(options.get("devices", 1))
