"""The GPT as a LightningModule: build, loss, optimizer, learning rate, and what of them a checkpoint records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from lit_stable.callbacks import EffectiveLR, Progress, SequenceLengthWarmup
from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.base import MisconfigurationException, log_number, rank_zero_info, rank_zero_warn
from lit_stable.callbacks.optimizer_state import initialise_state
from lit_stable.callbacks.private_names import window_is_open
from lit_stable.callbacks.progress import Mark
from lit_stable.callbacks.rank_mean import mean_over_ranks
from lit_stable.callbacks.safe_checkpoints import KEY
from lit_stable.callbacks.token_weights import losses_correction
from lit_stable.callbacks.topology import data_parallel_size
from lit_stable.model.config import GPTConfig
from lit_stable.model.documents import document_ids, find_separator
from lit_stable.model.gpt import GPT
from lit_stable.model.loss import sample_losses
from lit_stable.model.recompute import Recompute, refuse_recompute
from lit_stable.model.same_model import model_changes, model_record
from lit_stable.model.sharding import Compiled, build_gpt
from lit_stable.model_facts import ModelFacts
from lit_stable.optim.build import build_optimizer
from lit_stable.optim.options import ADAMW, OptimizerOptions
from lit_stable.optim.schedule import LRSchedule, resolve_conflict
from lit_stable.optim.write_back import recipe_values, write_back
from lit_stable.strategies.mesh import ONE_COPY, data_mesh, tensor_mesh
from lit_stable.strategies.precisions import BF16_TRUE_WARNING, precision_problem
from lit_stable.strategies.predivide import predivide_gradients, refuse_factor
from lit_stable.training_loss import TrainingLoss
from lit_stable.validation_losses import ValidationLosses
from lit_stable.weights.beginning import begin_with

_DECAY = "independent decay"  # name of our modifier


@judges_arguments(ValueError, "model")
class GPTModule(ModelFacts):
    """Train a GPT on batches ``{"input_ids": (B, T), "labels": (B, T), "source": (B,)}``.

    The model is built in ``configure_model``, on its device, and sharded there when the strategy has a device mesh.
    The learning rate of a step is a function of what was committed before it. Hyper-parameters always come from the
    recipe: a resume writes them over what the checkpoint restored, and says what changed.

    With ``gpt.document_mask`` tokens attend within their own document, in training and validation: as the batch numbers
    them (``documents``, (B, T)), else by the end-of-document tokens among ``input_ids``.

    Logged at logging steps: ``train/loss`` (cross-entropy in nats per token, mean over the whole global batch, in
    fp32), ``lr`` (as callbacks modify it), with ``z_loss`` also ``train/z_loss`` (what it adds) and with
    ``gpt.embed_grad_shrink`` ``train/embed_gradient`` (the share); at validation ``val/loss`` and per named set and
    source ``val/NAME/loss`` and ``val/NAME/perplexity``.

    Args:
        gpt: The model.
        schedule: The learning rate.
        optimizer: Which optimizer, with which options.
        seed_init: Of the initial weights.
        compile: ``on``: compile each block, the last norm, and on CUDA the embedding. ``whole``: blocks and last norm
            in one graph instead, where nothing is sharded. ``auto``: ``on`` on CUDA, else ``off``.
        recompute: Activation checkpointing: run each block a second time in the backward pass; ``selective``: but not
            its attention kernel, nor every other matrix product.
        z_loss: Weight of the mean of log(Z)^2 in the training loss, Z being the softmax's denominator; 0: none. 1e-4 in
            PaLM (arXiv:2204.02311, section 5).
        gradient_predivide: Divide gradients by this before they are added up over the ranks, and by the rest
            afterwards, under ddp and fsdp2; null: as the strategy does by itself. 32 in OPT.

    Raises:
        ValueError: when a value is out of range; in ``setup``, when nobody names the end-of-document token that a
            document mask needs.
        MisconfigurationException: at the start of a fit, when the strategy cannot pre-divide.
    """

    def __init__(
        self,
        gpt: GPTConfig,
        schedule: LRSchedule,
        optimizer: OptimizerOptions = ADAMW,
        seed_init: int = 0,
        compile: Literal["auto", "on", "whole", "off"] = "auto",
        recompute: Recompute = False,
        z_loss: float = 0.0,
        gradient_predivide: float | None = None,
    ) -> None:
        super().__init__(gpt)
        refuse_factor(gradient_predivide)
        refuse_recompute(recompute)
        self.schedule = schedule
        self.optimizer_options = optimizer
        self.seed_init = seed_init
        self.compile_option = compile
        self.compiled: Compiled = "off"  # what the option comes to, once there is a network
        self.recompute = recompute
        self.training_loss = TrainingLoss(z_loss)
        self.gradient_predivide = gradient_predivide
        self.gpt: GPT | None = None
        self.operations: tuple[str, ...] = ()  # done to the model of the checkpoint to be loaded, see `Surgery`
        self.validation_losses = ValidationLosses()
        self.window_loss: Tensor | None = None  # mean loss of the last committed window, fp32, on the device
        self.sample_losses: tuple[Tensor, Tensor, Tensor] | None = None  # what `SourceLoss` reads
        self._separator: int | None = None
        self._recipe_groups: list[dict[str, Any]] = []

    # -- model -------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if self.config.document_mask:
            self._separator = find_separator(self.config, self.trainer.datamodule)  # type: ignore[attr-defined]
        if stage == "fit" and self.optimizer_options.decay == "independent":
            EffectiveLR.of(self.trainer).add_option(_DECAY, "weight_decay", self._independent_decay)

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self.optimizer_options.decay == "independent":
            EffectiveLR.of(self.trainer).remove(_DECAY)

    def configure_model(self) -> None:
        if self.gpt is not None:
            return
        self._judge_precision()
        self.compiled = compiled = self._what_is_compiled(self.trainer.strategy.root_device)
        # Fixed shapes make faster code, and torch gives up on them, silently, after eight different ones.
        fixed_shapes = not any(isinstance(c, SequenceLengthWarmup) for c in self.trainer.callbacks)  # type: ignore[attr-defined]
        self.build(compiled, fixed_shapes)
        if self.initial_weights is not None:
            self.begin_with(self.initial_weights)
        if compiled != "off" and self.trainer.strategy.root_device.type != "cuda":  # there it is a kernel of its own
            self.training_loss.compile(dynamic=False if fixed_shapes else None)

    def build(self, compile: Compiled, fixed_shapes: bool) -> None:
        """Make the network, on its device, from ``seed_init``."""
        mesh = self.device_mesh  # set by strategies that have one
        self.gpt = build_gpt(
            self.config,
            seed=self.seed_init,
            device=self.trainer.strategy.root_device,
            mesh=None if mesh is None else data_mesh(mesh),
            tensor_mesh=None if mesh is None else tensor_mesh(mesh),
            policy=getattr(self.trainer.strategy.precision_plugin, "policy", None),
            compile=compile,
            fixed_shapes=fixed_shapes,
            recompute=self.recompute,
            reshard_after_forward=getattr(self.trainer.strategy, "layout", ONE_COPY).reshard_after_forward,
        )

    def begin_with(self, path: Path) -> None:
        """Take the weights of a checkpoint of the network that is built."""
        assert self.gpt is not None
        for line in begin_with(self, self.gpt, path, self.operations):
            rank_zero_info(f"model.{line}")

    def _what_is_compiled(self, device: torch.device) -> Compiled:
        if self.compile_option == "auto":
            return "blocks" if device.type == "cuda" else "off"
        strategy = self.trainer.strategy
        if self.compile_option == "whole" and isinstance(strategy, ModelParallelStrategy | FSDPStrategy):
            raise MisconfigurationException(
                f"model.compile=whole under {type(strategy).__name__}: shards are gathered block by block, outside of"
                " compiled code; set model.compile to on."
            )
        return "blocks" if self.compile_option == "on" else self.compile_option

    def _judge_precision(self) -> None:
        strategy = self.trainer.strategy
        precision = strategy.precision_plugin.precision
        if problem := precision_problem(type(strategy).__name__, precision):
            raise MisconfigurationException(problem)
        if precision == "bf16-true":
            rank_zero_warn(BF16_TRUE_WARNING)

    def forward(self, input_ids: Tensor, documents: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Token ids (B, T), and the document of each if there is a document mask -> logits (B, T, V).

        With labels their cross-entropies (B, T) instead, where the head can make both in one go.
        """
        assert self.gpt is not None
        answer: Tensor = self.gpt(input_ids, self.documents_of(input_ids, documents), labels)
        return answer

    def _forward_batch(self, batch: Mapping[str, Tensor], labels: Tensor | None = None) -> Any:
        return self(batch["input_ids"], batch.get("documents") if self.config.document_mask else None, labels)

    def documents_of(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor | None:
        """The document of each token (B, T), as given or by the separators among them; None: there is no mask."""
        if documents is None and self._separator is not None:
            documents = document_ids(input_ids, self._separator)
        return documents

    def count_batch(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        """(samples, tokens) of this rank's batch, for ``Progress``."""
        return batch["input_ids"].shape[0], batch["input_ids"].numel()

    @property
    def head_makes_losses(self) -> bool:
        """Whether training hands the head the labels; a z-loss is of logits."""
        return not self.training_loss.z_weight

    # -- steps -------------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        # Not in configure_optimizers: `EightBitAdam` converts what that returns, and needs no 32-bit moments.
        for optimizer in self.trainer.optimizers:
            initialise_state(optimizer)
        factor, ranks = self.gradient_predivide, data_parallel_size(self.trainer)
        if factor is not None and not predivide_gradients(self.trainer.strategy, factor, ranks):
            rank_zero_info(f"model.gradient_predivide={factor}: one data-parallel rank, so no sum to divide before.")

    def on_train_start(self) -> None:
        self.training_loss.clear()
        for line in write_back(self.trainer.optimizers[0], self._recipe_groups):
            rank_zero_info(line)

    def on_train_epoch_start(self) -> None:
        self.training_loss.clear()  # an epoch that was cut short leaves a window that never steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        start = Progress.of(self.trainer).scheduled
        lr = self.schedule.rate(start)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        if self.config.embed_grad_shrink is not None:
            assert self.gpt is not None
            # Filled on the device: the host waits for nothing, and a compiled graph sees a tensor.
            self.gpt.embed_gradient = torch.full((), self.config.embed_gradient(start.steps), device=self.device)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["labels"]
        answer = self._forward_batch(batch, labels if self.head_makes_losses else None)
        loss, sums, counts = self.training_loss(answer, labels)
        self.sample_losses = sums, counts, batch["source"]
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        reported = is_reported_step(self.trainer, self.trainer.global_step + 1)
        over_labels = losses_correction(self.trainer) is not None
        means = self.training_loss.window(partial(mean_over_ranks, self.trainer) if reported else None, over_labels)
        if not reported:
            return
        self.window_loss = means["loss"]
        for name, mean in means.items():
            self.log(f"train/{name}", mean)
        if self.config.embed_grad_shrink is not None:
            assert self.gpt is not None
            self.log("train/embed_gradient", self.gpt.embed_gradient)
        log_number(self, "lr", EffectiveLR.rate_of_step(self.trainer, optimizer))
        log_number(self, "step", Progress.of(self.trainer).steps)  # the loggers' x axis

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not window_is_open(self.trainer):  # callbacks have seen them: this hook is behind theirs
            for optimizer in self.trainer.optimizers:
                # Lightning would keep gradients through the next forward pass, where memory is dearest.
                optimizer.zero_grad(set_to_none=True)

    # -- validation --------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        sets = getattr(self.trainer.datamodule, "validation_sources", None)  # type: ignore[attr-defined]
        if sets is None:  # somebody else's data: one set per loader, of one source
            loaders = self.trainer.test_dataloaders if self.trainer.testing else self.trainer.val_dataloaders
            sets = {str(number): ["all"] for number in range(len(loaders) if isinstance(loaders, list) else 1)}
        self.validation_losses.start(sets, self.device)

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        sums, counts = sample_losses(self._forward_batch(batch), batch["labels"])
        self.validation_losses.update(dataloader_idx, sums, counts, batch["source"])

    def on_validation_epoch_end(self) -> None:
        for name, value in self.validation_losses.compute().items():
            self.log(name, value)
        log_number(self, "step", Progress.of(self.trainer).steps)

    test_step = validation_step
    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Optimizer:
        optimizer = build_optimizer(self.optimized(self), self.optimizer_options, self.schedule.peak)
        self._recipe_groups = recipe_values(optimizer)
        return optimizer

    def _independent_decay(self, mark: Mark, value: float, group: int) -> float:
        # AdamW takes lr x decay from a weight; with this it takes what was asked for x lr / peak, for every group.
        factor: float = self._recipe_groups[group].get("lr_factor", 1.0)
        return value / (self.schedule.peak * factor)

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.setdefault(KEY, {})
        own["schedule"], own["model"] = asdict(self.schedule), model_record(self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._compare_models(checkpoint.get(KEY, {}).get("model", {}))
        stored = checkpoint.get(KEY, {}).get("schedule")
        if stored is not None and self.trainer.training:
            try:
                self.schedule, lines = resolve_conflict(self.schedule, stored)
            except ValueError as error:
                raise MisconfigurationException(str(error)) from error
            for line in lines:
                rank_zero_info(f"model.{line} (on_conflict: {self.schedule.on_conflict})")

    def _compare_models(self, stored: Mapping[str, Any]) -> None:
        problems, lines = model_changes(self.config, stored, self.operations) if stored else ([], [])
        if problems:
            raise MisconfigurationException("\n".join(problems))
        for line in lines:
            rank_zero_info(f"model.{line}")


def is_reported_step(trainer: Trainer, step: int) -> bool:
    """Whether a line is printed for an optimizer step, counted from 1: the first, the logged ones, the last."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return step == 1 or (every > 0 and step % every == 0) or step == trainer.max_steps
