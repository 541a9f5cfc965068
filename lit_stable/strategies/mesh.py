"""How ranks are laid out: copies of the model, shards of a copy, pieces of a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lit_stable.callbacks.argument_types import judges_arguments

DATA, REPLICATE, SHARD, TENSOR = "data_parallel", "replicate", "shard", "tensor_parallel"
"""Names of mesh dimensions. The data-parallel ranks are one dimension, or two where the shards are replicated."""


@judges_arguments(ValueError, "mesh")
@dataclass(frozen=True)
class MeshOptions:
    """The layout of the ranks under strategy fsdp2.

    Ranks that stand side by side share the matrices of a block (keep them inside a node), those of different copies
    stand furthest apart. A rank sees the samples of its place among the ``ranks / tensor_parallel`` data-parallel ones.
    """

    tensor_parallel: int = 1
    """Ranks that split each matrix of a block between them and see the same samples; divides the number of heads."""

    replicate: int = 1
    """Copies of the model, each sharded over ranks / (replicate x tensor_parallel): hybrid sharding, in which
    parameters are gathered inside a copy (a node, say) and only gradients cross."""

    reshard_after_forward: bool | None = None
    """Free the gathered weights of blocks after the forward pass and gather them again in the backward pass; null: only
    where they take more than 3 GiB. Results do not depend on it, bit for bit."""

    def __post_init__(self) -> None:
        problems = [
            f"mesh.{name}={value}: must be at least 1."
            for name, value in (("tensor_parallel", self.tensor_parallel), ("replicate", self.replicate))
            if value < 1
        ]
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def is_plain(self) -> bool:
        """Whether nothing departs from the defaults: every rank holds one shard of the only copy."""
        return self == ONE_COPY

    def problems(self, ranks: int) -> list[str]:
        """What keeps so many ranks from being laid out like this."""
        whole = self.tensor_parallel * self.replicate
        if ranks % whole == 0:
            return []
        below = ranks // whole * whole
        legal = " and ".join(str(n) for n in (below, below + whole) if n)
        return [
            f"{ranks} ranks: must be a multiple of mesh.tensor_parallel={self.tensor_parallel} x"
            f" mesh.replicate={self.replicate} = {whole}; nearest legal: {legal}."
        ]


ONE_COPY = MeshOptions()
"""Every rank one shard of the one copy: the layout that a recipe has by default."""


def build_mesh(options: MeshOptions, device_type: str, ranks: int) -> DeviceMesh:
    """A mesh over all ranks, with the dimensions replicate, shard and tensor_parallel."""
    shards = ranks // (options.replicate * options.tensor_parallel)
    shape = (options.replicate, shards, options.tensor_parallel)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD, TENSOR))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a mesh that `fully_shard` takes: one dimension, or copies x shards."""
    names = mesh.mesh_dim_names or ()
    return mesh[REPLICATE, SHARD] if REPLICATE in names else mesh[DATA]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The tensor-parallel part of a mesh; ``None`` where it has one rank."""
    names = mesh.mesh_dim_names or ()
    return mesh[TENSOR] if TENSOR in names and mesh[TENSOR].size() > 1 else None


def describe_mesh(mesh: DeviceMesh) -> str:
    """The sizes of a mesh for the first lines of a run, such as ``replicate 2 x shard 4 x tensor_parallel 2``."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "1 rank"
