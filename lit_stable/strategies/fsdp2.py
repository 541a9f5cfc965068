"""Fully sharded data parallelism, torch's second kind (`fully_shard`), on GPUs and on CPUs with gloo."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.rank_agreement import refuse_ranks_that_differ
from lit_stable.callbacks.safe_checkpoints import KEY
from lit_stable.strategies.fsdp2_precision import as_policy
from lit_stable.strategies.gradients import average_copied_gradients, average_whole_gradients
from lit_stable.strategies.mesh import MeshOptions, build_mesh, data_mesh
from lit_stable.strategies.one_file import load_one_file
from lit_stable.strategies.resharding import ReshardsAfterEvaluation


@judges_arguments(MisconfigurationException)
class FSDP2Strategy(ReshardsAfterEvaluation, ModelParallelStrategy):
    """``ModelParallelStrategy`` by the name ``fsdp2``: 16 bits as a policy; by default every rank is data-parallel.

    Parameters that the module leaves whole (norms in fp32) are kept on every rank; their gradients are averaged over
    all ranks in one collective per optimizer step, before any callback sees them. What tensor-parallel ranks hold in
    common stays equal on them bit for bit.

    Args:
        save_distributed_checkpoint: ``True``: a folder with one file per rank, which any number of ranks can load.
            ``False``: one file, gathered on rank 0.
        tensor_parallel: Ranks that split each matrix between them; they see the same samples.
        replicate: Copies of the model, each sharded over the ranks that are left (hybrid sharding).
        reshard_after_forward: For the module, which reads it from ``layout`` and shards by it; see `MeshOptions`.
        process_group_backend: ``nccl`` or ``gloo``; ``None``: what suits the device.
        timeout_minutes: How long a collective may wait for the slowest rank.

    Raises:
        MisconfigurationException: when torch is older than 2.7, whose ``fully_shard`` cannot leave parameters whole;
            on CPUs, when its ``fully_shard`` sums gradients there instead of averaging them (seen with 2.7.1); when
            the ranks cannot be laid out as asked; for a precision that is not trained in here.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        tensor_parallel: int = 1,
        replicate: int = 1,
        reshard_after_forward: bool | None = None,
        process_group_backend: str | None = None,
        timeout_minutes: float = 30.0,
    ) -> None:
        if "ignored_params" not in inspect.signature(fully_shard).parameters:
            raise MisconfigurationException(
                f"torch {torch.__version__}: strategy fsdp2 needs torch 2.7 or newer; or use ddp."
            )
        self.layout = MeshOptions(tensor_parallel, replicate, reshard_after_forward)
        self._world: dist.ProcessGroup | None = None  # that the mesh is of
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )

    def setup_environment(self) -> None:
        ranks = self.num_nodes * self.num_processes
        if problems := self.layout.problems(ranks):
            raise MisconfigurationException("\n".join(problems))
        self._tensor_parallel_size = self.layout.tensor_parallel
        self._data_parallel_size = ranks // self._tensor_parallel_size
        assert self.lightning_module is not None
        if self._device_mesh is not None and dist.group.WORLD is self._world:
            # A further fit, as after a rewind. Nobody takes down the groups of a mesh: their threads stay, and on GPUs
            # NCCL's memory.
            self._setup_distributed()
        else:
            super().setup_environment()
            self._world = dist.group.WORLD
            if self.layout.replicate > 1:
                self._device_mesh = build_mesh(self.layout, self.root_device.type, ranks)
        self.lightning_module._device_mesh = self._device_mesh
        if self.root_device.type == "cpu" and not averages_gradients(data_mesh(self.device_mesh)):
            raise MisconfigurationException(
                f"torch {torch.__version__}: on CPUs its fully_shard sums gradients over the ranks instead of averaging"
                " them; use strategy ddp there, or a newer torch (2.13 averages)."
            )

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        # Before the mesh, whose process groups wait for all of their ranks.
        refuse_ranks_that_differ("strategy FSDP2Strategy", {f"mesh.{k}": v for k, v in asdict(self.layout).items()})

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self.layout.tensor_parallel  # neighbours, which see the same samples
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        on_cpu = isinstance(self.accelerator, CPUAccelerator)
        self._precision_plugin = as_policy(plugin, "cpu" if on_cpu else "cuda")

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
            average_whole_gradients(optimizer)
            average_copied_gradients(optimizer)
            return result

        return super().optimizer_step(optimizer, average_then_step, model, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        # Not copied to the host, as Lightning's own are: whoever writes shards takes them from where they are.
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        assert self.model is not None
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.model, bare)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint.setdefault(KEY, {})["written_by"] = "fsdp2"
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file() and self.optimizers:
            # No more is unpickled of a file than the caller lets: `None` is torch's default, as in Lightning.
            stored = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only).get(KEY, {})
            if stored.get("written_by") != "fsdp2":
                assert self.model is not None
                assert self.lightning_module is not None
                strict = self.lightning_module.strict_loading
                return load_one_file(path, self.model, self.optimizers, strict, weights_only)
        return super().load_checkpoint(checkpoint_path, *([] if weights_only is None else [weights_only]))


def averages_gradients(mesh: DeviceMesh) -> bool:
    """Whether ``fully_shard`` averages gradients over the data-parallel ranks of a CPU mesh, tried on one tiny layer.

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
