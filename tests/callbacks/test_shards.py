"""Numbers combined over ranks, with the collective played; real ranks: tests/distributed/test_mesh.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lit_stable.callbacks import shards
from lit_stable.callbacks.grad_norm import tensor_norms
from lit_stable.callbacks.shards import OverShards, local, shard_groups, summed_piece


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes into each collective; another rank is played that holds 10 where this one has something else."""
    seen: list[Any] = []

    def all_reduce(values: torch.Tensor, op: Any, group: Any) -> None:
        seen.append((group, op, values.tolist()))
        values.copy_(values + 10 if op == dist.ReduceOp.SUM else values.clamp(min=10))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return seen


def test_pieces_of_fsdp1_are_combined_in_one_collective_and_what_is_whole_in_none(
    reductions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    monkeypatch.setattr(shards, "fsdp1_shards", lambda model: ({parameters[1], parameters[3]}, "shards"))
    over = OverShards(parameters, nn.Linear(1, 1))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert over.sum(values).tolist() == [1.0, 12.0, 3.0, 14.0]
    assert over.largest(values).tolist() == [1.0, 10.0, 3.0, 10.0]
    assert values.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert [(group, picked) for group, _, picked in reductions] == [("shards", [2.0, 4.0])] * 2


def test_a_rank_without_a_gradient_takes_part(reductions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))]
    monkeypatch.setattr(shards, "fsdp1_shards", lambda model: (set(parameters), "shards"))
    over = OverShards(parameters, nn.Linear(1, 1))
    for kind in ("l2", "inf"):
        tensor_norms(parameters, over, kind)  # type: ignore[arg-type]
    parameters[0].grad = torch.tensor([3.0, 4.0])
    parameters[1].grad = torch.zeros(0)
    assert tensor_norms(parameters, over).tolist() == pytest.approx([35**0.5, 10**0.5])
    assert [picked for _, _, picked in reductions] == [[0.0, 0.0], [0.0, 0.0], [25.0, 0.0]]


def test_one_process_talks_to_nobody(reductions: list[Any]) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.tensor([3.0, -4.0])
    over = OverShards(parameters)
    assert tensor_norms(parameters, over).tolist() == [5.0, 0.0]
    assert tensor_norms(parameters, over, "inf").tolist() == [4.0, 0.0]
    assert not reductions
    assert shard_groups(parameters[0]) == ()
    assert local(parameters[0]) is summed_piece(parameters[0]) is parameters[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_that_is_not_finite_is_seen_and_spoils_no_other(bad: float) -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    parameters[0].grad = torch.tensor([1.0, bad], dtype=torch.bfloat16)
    parameters[1].grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    for kind, other in (("l2", 5.0), ("inf", 4.0)):
        norms = tensor_norms(parameters, OverShards(parameters), kind)  # type: ignore[arg-type]
        assert norms.dtype == torch.float32
        assert not torch.isfinite(norms[0])
        assert norms[1] == other
