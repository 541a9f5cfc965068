"""The GPT as a LightningModule: build, loss, optimizer, learning rate, and what of them a checkpoint records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import AdamW

from lit_stable.callbacks import Progress, SequenceLengthWarmup
from lit_stable.callbacks.base import MisconfigurationException, rank_zero_info, rank_zero_warn
from lit_stable.callbacks.optimizer_state import initialise_state
from lit_stable.callbacks.safe_checkpoints import KEY
from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import flops_per_token
from lit_stable.model.gpt import GPT
from lit_stable.model.loss import sample_losses
from lit_stable.model.sharding import build_gpt
from lit_stable.optim.groups import parameter_groups
from lit_stable.optim.schedule import LRSchedule, resolve_conflict
from lit_stable.strategies.mesh import data_mesh, tensor_mesh
from lit_stable.strategies.precisions import BF16_TRUE_WARNING, precision_problem
from lit_stable.validation_losses import ValidationLosses


@dataclass(frozen=True)
class AdamWOptions:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), always fused; decay multiplied by the learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment, > 0."""
    weight_decay: float = 0.1
    """Of linear weights and, if so chosen, embeddings; norms and biases are never decayed."""
    decay_embeddings: bool = True
    """Whether embedding weights are decayed too."""

    def __post_init__(self) -> None:
        problems = [f"optimizer.betas={self.betas}: each must lie in [0, 1)."] if _bad_betas(self.betas) else []
        if self.eps <= 0:
            problems.append(f"optimizer.eps={self.eps}: must be > 0.")
        if self.weight_decay < 0:
            problems.append(f"optimizer.weight_decay={self.weight_decay}: must be >= 0.")
        if problems:
            raise ValueError("\n".join(problems))


def _bad_betas(betas: tuple[float, float]) -> bool:
    return not all(0 <= beta < 1 for beta in betas)


class GPTModule(LightningModule):
    """Train a GPT on batches ``{"input_ids": (B, T), "labels": (B, T), "source": (B,)}``.

    The model is built in ``configure_model``, on its device, and sharded there when the strategy has a device mesh.
    The learning rate of a step is a function of what was committed before it. Hyper-parameters always come from the
    recipe: a resume writes them over what the checkpoint restored, and says what changed.

    Logged at logging steps: ``train/loss`` (nats per token, mean over the whole global batch, in fp32) and ``lr``; at
    validation ``val/loss`` and per named set and source ``val/NAME/loss`` and ``val/NAME/perplexity``.

    Args:
        gpt: The model.
        schedule: The learning rate.
        optimizer: AdamW's options.
        seed_init: Of the initial weights.
        compile: Compile each block: ``auto`` = on CUDA only.
        recompute: Activation checkpointing: run each block a second time in the backward pass.
    """

    def __init__(
        self,
        gpt: GPTConfig,
        schedule: LRSchedule,
        optimizer: AdamWOptions = AdamWOptions(),
        seed_init: int = 0,
        compile: Literal["auto", "on", "off"] = "auto",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config = gpt
        self.schedule = schedule
        self.optimizer_options = optimizer
        self.seed_init = seed_init
        self.compile_blocks = compile
        self.recompute = recompute
        self.gpt: GPT | None = None
        self.validation_losses = ValidationLosses()
        self.window_loss: Tensor | None = None  # mean loss of the last committed window, fp32, on the device
        self.sample_losses: tuple[Tensor, Tensor, Tensor] | None = None  # what `SourceLoss` reads
        self._losses: list[Tensor] = []
        self._loss_function = sample_losses
        self._recipe_groups: list[dict[str, Any]] = []

    # -- model -------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        if self.gpt is not None:
            return
        strategy = self.trainer.strategy
        self._judge_precision()
        device = strategy.root_device
        mesh = self.device_mesh  # set by strategies that have one
        compiled = self.compile_blocks == "on" or (self.compile_blocks == "auto" and device.type == "cuda")
        # Fixed shapes make faster code, and torch gives up on them, silently, after eight different ones.
        fixed_shapes = not any(isinstance(c, SequenceLengthWarmup) for c in self.trainer.callbacks)  # type: ignore[attr-defined]
        self.gpt = build_gpt(
            self.config,
            seed=self.seed_init,
            device=device,
            mesh=None if mesh is None else data_mesh(mesh),
            tensor_mesh=None if mesh is None else tensor_mesh(mesh),
            policy=getattr(strategy.precision_plugin, "policy", None),
            compile_blocks=compiled,
            fixed_shapes=fixed_shapes,
            recompute=self.recompute,
        )
        if compiled:
            # In a region of its own the fp32 copy of the logits is never written to memory.
            self._loss_function = torch.compile(sample_losses, dynamic=False if fixed_shapes else None)

    def _judge_precision(self) -> None:
        strategy = self.trainer.strategy
        precision = strategy.precision_plugin.precision
        if problem := precision_problem(type(strategy).__name__, precision):
            raise MisconfigurationException(problem)
        if precision == "bf16-true":
            rank_zero_warn(BF16_TRUE_WARNING)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) -> logits (B, T, V)."""
        assert self.gpt is not None
        logits: Tensor = self.gpt(input_ids)
        return logits

    def count_batch(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        """(samples, tokens) of this rank's batch, for ``Progress``."""
        return batch["input_ids"].shape[0], batch["input_ids"].numel()

    def flops_per_token(self, length: int) -> int:
        """Operations of training on one token in sequences of ``length``, for ``Throughput``."""
        return flops_per_token(self.config, length)

    # -- steps -------------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        # Not in configure_optimizers: `EightBitAdam` converts what that returns, and needs no 32-bit moments.
        for optimizer in self.trainer.optimizers:
            initialise_state(optimizer)

    def on_train_start(self) -> None:
        self._losses = []
        self._write_back_hyperparameters()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        start = Progress.of(self.trainer).scheduled
        lr = self.schedule.lr(getattr(start, self.schedule.unit))
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = lr

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        sums, counts = self._loss_function(self(batch["input_ids"]), batch["labels"])  # (B,), (B,)
        loss: Tensor = sums.sum() / counts.sum()
        self.sample_losses = sums.detach(), counts, batch["source"]
        self._losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        losses, self._losses = self._losses, []
        if not is_reported_step(self.trainer, self.trainer.global_step + 1):
            return
        self.window_loss = self.trainer.strategy.reduce(torch.stack(losses).mean(), reduce_op="mean")
        self.log("train/loss", self.window_loss)
        self.log("lr", optimizer.param_groups[0]["lr"])
        self.log("step", float(Progress.of(self.trainer).steps))  # the loggers' x axis

    # -- validation --------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        sets = getattr(self.trainer.datamodule, "validation_sources", None)  # type: ignore[attr-defined]
        if sets is None:  # somebody else's data: one set per loader, of one source
            loaders = self.trainer.test_dataloaders if self.trainer.testing else self.trainer.val_dataloaders
            sets = {str(number): ["all"] for number in range(len(loaders) if isinstance(loaders, list) else 1)}
        self.validation_losses.start(sets, self.device)

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        sums, counts = sample_losses(self(batch["input_ids"]), batch["labels"])
        self.validation_losses.update(dataloader_idx, sums, counts, batch["source"])

    def on_validation_epoch_end(self) -> None:
        for name, value in self.validation_losses.compute().items():
            self.log(name, value)
        self.log("step", float(Progress.of(self.trainer).steps))

    test_step = validation_step
    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> AdamW:
        assert self.gpt is not None
        options = self.optimizer_options
        groups = parameter_groups(self.gpt, options.weight_decay, options.decay_embeddings)
        optimizer = AdamW(groups, lr=self.schedule.peak, betas=options.betas, eps=options.eps, fused=True)
        self._recipe_groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return optimizer

    def _write_back_hyperparameters(self) -> None:
        for group, recipe in zip(self.trainer.optimizers[0].param_groups, self._recipe_groups, strict=True):
            for key, value in recipe.items():
                restored = group.get(key)
                if (
                    key in ("betas", "eps", "weight_decay")
                    and restored is not None
                    and _plain(restored) != _plain(value)
                ):
                    rank_zero_info(f"optimizer group {recipe['name']}: {key} {restored} -> {value} (recipe)")
                group[key] = value

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.setdefault(KEY, {})["schedule"] = asdict(self.schedule)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stored = checkpoint.get(KEY, {}).get("schedule")
        if stored is not None and self.trainer.training:
            try:
                self.schedule, lines = resolve_conflict(self.schedule, stored)
            except ValueError as error:
                raise MisconfigurationException(str(error)) from error
            for line in lines:
                rank_zero_info(f"model.{line} (on_conflict: {self.schedule.on_conflict})")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def is_reported_step(trainer: Trainer, step: int) -> bool:
    """Whether a line is printed for an optimizer step, counted from 1: the first, the logged ones, the last."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return step == 1 or (every > 0 and step % every == 0) or step == trainer.max_steps
