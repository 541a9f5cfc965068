"""The layout of the ranks, from options to a mesh of one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lit_stable.strategies.mesh import MeshOptions, build_mesh, data_mesh, describe_mesh, tensor_mesh


@pytest.fixture(autouse=True)
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


def test_sizes_below_one_are_refused_together():
    with pytest.raises(ValueError, match=r"mesh\.tensor_parallel=0: must be at least 1\.\nmesh\.replicate=-1: must"):
        MeshOptions(0, -1)


@pytest.mark.parametrize(
    ("options", "ranks", "legal"),
    [
        (MeshOptions(2, 2), 6, "4 and 8"),
        (MeshOptions(tensor_parallel=8), 4, "8"),
        (MeshOptions(replicate=3), 8, "6 and 9"),
    ],
)
def test_ranks_that_do_not_divide_are_refused_with_the_nearest_that_do(options, ranks, legal):
    (problem,) = options.problems(ranks)
    assert problem.startswith(f"{ranks} ranks: must be a multiple of mesh.tensor_parallel={options.tensor_parallel} x")
    assert problem.endswith(f"; nearest legal: {legal}.")


def test_ranks_that_divide_are_not():
    assert MeshOptions(2, 2).problems(8) == MeshOptions().problems(5) == []


def test_only_the_default_is_plain():
    assert MeshOptions().is_plain
    assert not MeshOptions(tensor_parallel=2).is_plain
    assert not MeshOptions(replicate=2).is_plain
    assert not MeshOptions(reshard_after_forward=True).is_plain


def test_the_data_parallel_part_has_one_dimension_or_copies_by_shards():
    flat = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    assert data_mesh(flat).mesh_dim_names == ("data_parallel",)
    assert data_mesh(build_mesh(MeshOptions(), "cpu", 1)).mesh_dim_names == ("replicate", "shard")


def test_a_tensor_parallel_part_of_one_rank_is_none():
    assert tensor_mesh(build_mesh(MeshOptions(), "cpu", 1)) is None
    assert tensor_mesh(init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))) is None


class Shape:
    """As much of a mesh as its description needs."""

    def __init__(self, **sizes: int) -> None:
        self.mesh_dim_names, self.shape = tuple(sizes), tuple(sizes.values())


def test_a_mesh_is_described_by_what_is_split():
    assert describe_mesh(Shape(replicate=2, shard=4, tensor_parallel=2)) == "replicate 2 x shard 4 x tensor_parallel 2"
    assert describe_mesh(Shape(data_parallel=8, tensor_parallel=1)) == "data_parallel 8"
    assert describe_mesh(Shape(data_parallel=1, tensor_parallel=1)) == "1 rank"
