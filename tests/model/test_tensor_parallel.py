"""What one process can show of splitting a GPT over ranks; tests/distributed has two and four."""

from __future__ import annotations

import dataclasses
import tempfile

import pytest
import torch
import torch.distributed as dist
from any_gpt import LENGTH, VOCAB, any_options
from hypothesis import Phase, given, settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lit_stable.model.config import GPTConfig
from lit_stable.model.documents import document_ids
from lit_stable.model.gpt import GPT
from lit_stable.model.norm import is_norm_or_gain
from lit_stable.model.sharding import build_gpt
from lit_stable.model.tensor_parallel import split_block, split_ends, tensor_parallel_problems

TINY = GPTConfig(vocab_size=50, n_layer=1, n_head=4, d_model=32, max_length=12, bias=True, qk_norm="rmsnorm")


def problems(ranks: int, **changes) -> list[str]:
    return tensor_parallel_problems(dataclasses.replace(TINY, **changes), ranks)


def test_one_rank_asks_nothing_of_the_model():
    assert problems(1, n_head=1, d_ff=3, vocab_size=7, dropout=0.5) == []


def test_heads_hidden_units_and_vocabulary_must_divide_evenly_and_all_is_said_at_once():
    assert problems(8, d_ff=12) == [
        "model.gpt.n_head=4: must be a multiple of mesh.tensor_parallel=8; nearest legal: 8.",
        "model.gpt.d_ff=12: must be a multiple of mesh.tensor_parallel=8; nearest legal: 8 and 16.",
        "model.gpt.vocab_size=50: must be a multiple of mesh.tensor_parallel=8; nearest legal: 48 and 56.",
    ]


def test_a_size_that_splits_a_dropout_group_is_refused_with_dropout_only():
    odd = {"n_head": 12, "d_model": 96, "vocab_size": 48}
    assert problems(3, **odd) == []
    (problem,) = problems(3, dropout=0.1, **odd)
    assert problem == (
        "model.gpt.dropout=0.1: attention draws it for 4 groups of heads, which mesh.tensor_parallel=3 cannot share"
        " evenly; take a size that divides 4, or no dropout."
    )
    assert problems(4, dropout=0.1, **odd) == []
    assert problems(3, dropout=0.1, attention_dropout=0.0, **odd) == []
    assert problems(3, attention_dropout=0.1, **odd)[0].startswith("model.gpt.attention_dropout=0.1: ")


def test_grouped_queries_are_split_by_their_keys():
    assert problems(2, n_kv_head=2) == []
    assert problems(2, n_kv_head=1) == [
        "model.gpt.n_kv_head=1: must be a multiple of mesh.tensor_parallel=2; nearest legal: 2.",
    ]


@pytest.fixture
def mesh(tmp_path) -> DeviceMesh:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))["tensor_parallel"]


def build(mesh: DeviceMesh | None, **changes) -> GPT:
    config = dataclasses.replace(TINY, **changes)
    return build_gpt(config, seed=1, device=torch.device("cpu"), tensor_mesh=mesh)


@pytest.mark.parametrize("changes", [{}, {"mlp": "swiglu", "position": "rope"}, {"tied": False, "head_fp32": True}])
def test_every_matrix_is_split_as_planned_and_norms_are_whole(mesh, changes):
    gpt = build(mesh, **changes)
    norms = {p for m in gpt.modules() if is_norm_or_gain(m) for p in m.parameters(recurse=False)}
    found = {n: p.placements[0] for n, p in gpt.named_parameters() if isinstance(p, DTensor)}
    expected = {}
    for name, parameter in gpt.named_parameters():
        if parameter in norms:
            continue
        by_rows = name.rsplit(".", 1)[0].endswith(("qkv", "up", "gate", "wte", "head"))
        columns = Replicate() if name.endswith("bias") else Shard(1)  # of `out` and `down`; `wpe` is no Linear
        expected[name] = Shard(0) if by_rows else columns
    assert found == expected
    assert all(not isinstance(p, DTensor) for p in norms)


def test_splitting_over_one_rank_changes_no_bit(mesh):
    ids = torch.arange(12)[None]
    assert torch.equal(build(mesh)(ids), build(None)(ids))


@settings(max_examples=30, derandomize=True, deadline=None, phases=[Phase.generate])
@given(options=any_options())
def test_any_model_has_a_place_in_the_plan_and_is_the_same_over_one_rank(options):
    if not dist.is_initialized():
        with tempfile.NamedTemporaryFile() as store:
            dist.init_process_group("gloo", init_method=f"file://{store.name}-store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))["tensor_parallel"]
    whole, split = (
        build_gpt(GPTConfig(**options), seed=1, device=torch.device("cpu"), tensor_mesh=over) for over in (None, mesh)
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    logits = []
    for gpt in (whole, split):
        torch.manual_seed(5)
        logits.append(gpt(ids, document_ids(ids, 0) if options["document_mask"] else None))
        logits[-1].square().mean().backward()
    assert torch.equal(*logits)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        gradient = other.grad.full_tensor() if isinstance(other.grad, DTensor) else other.grad
        torch.testing.assert_close(gradient, one.grad, rtol=1e-4, atol=1e-6)  # a gated MLP adds in another order


def test_a_tied_head_stays_one_storage(mesh):
    gpt = build(mesh)
    assert gpt.head.weight is gpt.wte.weight


def test_the_gradients_of_query_and_key_norms_are_parts_of_a_sum_and_no_others(mesh, monkeypatch):
    monkeypatch.setattr(DeviceMesh, "size", lambda self, dim=None: 3)
    gpt = GPT(dataclasses.replace(TINY, n_head=6, d_model=48))
    attention = gpt.blocks[0].attention
    monkeypatch.setattr("lit_stable.model.tensor_parallel.parallelize_module", lambda *args: None)
    split_block(gpt.blocks[0], mesh)
    assert attention.first_head == 0
    for parameter in gpt.parameters():
        nn.init.ones_(parameter)
    sum(parameter.sum() for parameter in gpt.parameters()).backward()
    tripled = {name for name, parameter in gpt.named_parameters() if parameter.grad.flatten()[0] == 3}
    assert tripled == {"blocks.0.attention.q_norm.weight", "blocks.0.attention.k_norm.weight"}


def test_a_model_that_cannot_be_split_is_refused(mesh, monkeypatch):
    monkeypatch.setattr(DeviceMesh, "size", lambda self, dim=None: 3)
    with pytest.raises(ValueError, match=r"n_head=4: must be a multiple of mesh\.tensor_parallel=3"):
        build(mesh)


def test_a_part_without_a_place_in_the_plan_is_refused(mesh):
    gpt = GPT(TINY)
    gpt.blocks[0].mlp.extra = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"mlp\.extra \(Linear\): has parameters and no place in the plan"):
        split_block(gpt.blocks[0], mesh)
    gpt.extra = nn.Embedding(2, 2)
    with pytest.raises(NotImplementedError, match=r"extra \(Embedding\): has parameters and no place in the plan"):
        split_ends(gpt, mesh)
