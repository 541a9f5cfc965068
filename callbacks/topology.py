"""Where this process stands among the data-parallel ones, under any strategy and in either Lightning namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .private_names import device_mesh

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

TENSOR_PARALLEL = "tensor_parallel"


def _mesh(trainer: Trainer) -> Any:
    mesh = device_mesh(trainer)
    return mesh if mesh is not None and TENSOR_PARALLEL in (mesh.mesh_dim_names or ()) else None


def data_parallel_size(trainer: Trainer) -> int:
    """Number of ranks that see different samples: the world size divided by the tensor-parallel size."""
    mesh = _mesh(trainer)
    if mesh is None:
        return trainer.world_size
    return trainer.world_size // int(mesh.shape[mesh.mesh_dim_names.index(TENSOR_PARALLEL)])


def data_parallel_rank(trainer: Trainer) -> int:
    """Index of this rank among those that see different samples; equal within a tensor-parallel group."""
    mesh = _mesh(trainer)
    if mesh is None:
        return trainer.global_rank
    rank = 0
    for name, size, coordinate in zip(mesh.mesh_dim_names, mesh.shape, mesh.get_coordinate(), strict=True):
        if name != TENSOR_PARALLEL:
            rank = rank * size + coordinate
    return rank
