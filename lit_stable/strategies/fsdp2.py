"""Fully sharded data parallelism, torch's second kind (`fully_shard`), on GPUs and on CPUs with gloo."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.safe_checkpoints import KEY
from lit_stable.strategies.one_file import load_one_file


class FSDP2Precision(Precision):
    """bf16 as a policy of the sharded parameters instead of autocast: all-gathers move bf16, half the bytes.

    Weights, gradients and optimizer state are stored in fp32 and gradients are reduced in fp32; weights are rounded to
    bf16 for the forward and backward pass. The LightningModule applies ``policy`` in ``configure_model``.
    """

    precision = "bf16-mixed"
    # Inputs are not cast: a block's input has its dtype already, and fp32 side inputs must keep theirs.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class FSDP2Strategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` by the name ``fsdp2``, with every rank data-parallel and bf16 as a policy.

    Parameters that the module leaves whole (norms in fp32) are kept on every rank; their gradients are averaged over
    the data-parallel ranks in one collective per optimizer step, before any callback sees them.

    Args:
        save_distributed_checkpoint: ``True``: a folder with one file per rank, which any number of ranks can load.
            ``False``: one file, gathered on rank 0.
        process_group_backend: ``nccl`` or ``gloo``; ``None``: what suits the device.
        timeout_minutes: How long a collective may wait for the slowest rank.

    Raises:
        MisconfigurationException: when torch is older than 2.7, whose ``fully_shard`` cannot leave parameters whole;
            on CPUs, when its ``fully_shard`` sums gradients there instead of averaging them (seen with 2.7.1); for a
            precision other than 32-true and bf16-mixed.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout_minutes: float = 30.0,
    ) -> None:
        if "ignored_params" not in inspect.signature(fully_shard).parameters:
            raise MisconfigurationException(
                f"torch {torch.__version__}: strategy fsdp2 needs torch 2.7 or newer; or use ddp."
            )
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()
        if self.root_device.type == "cpu" and not averages_gradients(self.device_mesh["data_parallel"]):
            raise MisconfigurationException(
                f"torch {torch.__version__}: on CPUs its fully_shard sums gradients over the ranks instead of averaging"
                " them; use strategy ddp there, or a newer torch (2.13 averages)."
            )

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, MixedPrecision) and plugin.precision == "bf16-mixed":
            plugin = FSDP2Precision()
        elif plugin is not None and plugin.precision not in ("32-true", "bf16-mixed"):
            raise MisconfigurationException(
                f"precision={plugin.precision}: strategy fsdp2 takes 32-true or bf16-mixed."
            )
        self._precision_plugin = plugin

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def average_then_step() -> Any:
            # Inside the closure: after the backward pass, before `on_before_optimizer_step` of any callback.
            result = closure()
            self._average_whole_gradients(optimizer)
            return result

        return super().optimizer_step(optimizer, average_then_step, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint.setdefault(KEY, {})["written_by"] = "fsdp2"
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file() and self.optimizers:
            stored = torch.load(path, mmap=True, map_location="cpu", weights_only=False).get(KEY, {})
            if stored.get("written_by") != "fsdp2":
                assert self.model is not None
                assert self.lightning_module is not None
                return load_one_file(path, self.model, self.optimizers, self.lightning_module.strict_loading)
        return super().load_checkpoint(checkpoint_path, *([] if weights_only is None else [weights_only]))

    def on_validation_end(self) -> None:
        self._reshard()

    def on_test_end(self) -> None:
        self._reshard()

    def _reshard(self) -> None:
        # The root keeps its parameters gathered after a forward pass, for the backward pass that an evaluation never
        # runs: until the next training step the module's parameters would not be those that the optimizer holds.
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _average_whole_gradients(self, optimizer: Optimizer) -> None:
        group = self.device_mesh["data_parallel"].get_group()
        whole = [p for g in optimizer.param_groups for p in g["params"] if not isinstance(p, DTensor)]
        if not whole or dist.get_world_size(group) == 1:
            return
        # One that this rank did not use counts as zero: the collective has the same size everywhere.
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in whole]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        pieces = torch.split(flat, [g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)])


def averages_gradients(mesh: DeviceMesh) -> bool:
    """Whether ``fully_shard`` averages gradients over the ranks of a CPU mesh, tried on one tiny layer.

    torch 2.7 asks gloo for a mean and gets a sum, without a word: gradients too large by the number of ranks.
    """
    layer = nn.Linear(1, mesh.size(), bias=False)
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(1, 1)).sum().backward()  # d/dw = 1 on every rank
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    return bool((gradient.to_local() == 1.0).all())


def register_strategies() -> None:
    """Make ``strategy: fsdp2`` and ``strategy: fsdp2_full`` (one-file checkpoints) known to the Trainer."""
    for name, description, options in (
        ("fsdp2", "fully_shard, sharded checkpoints", {}),
        ("fsdp2_full", "fully_shard, one-file checkpoints", {"save_distributed_checkpoint": False}),
    ):
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, FSDP2Strategy, description=description, **options)
