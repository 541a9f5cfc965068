"""Inserted norms out of sight, and back."""

from __future__ import annotations

import pytest
import torch

from lit_stable.callbacks.optimizer_state import initialise_state
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.model.insertion import inserted_names, operations_between, out_of_sight
from lit_stable.model.same_model import model_record
from lit_stable.optim.build import build_optimizer
from lit_stable.optim.options import OptimizerOptions, PatternOptions

SHAPE = {"vocab_size": 11, "n_layer": 2, "n_head": 2, "d_model": 8, "max_length": 6}
NORMS = {"qk_norm": "layernorm", "embed_norm": True}


def built(**options):
    gpt = GPT(GPTConfig(**{**SHAPE, **options}))
    initialise(gpt, 0)
    return gpt


def test_which_norms_are_missing():
    with_both, plain = GPTConfig(**SHAPE, **NORMS), GPTConfig(**SHAPE)
    assert operations_between(with_both, model_record(plain)) == ["qk_norm", "embed_norm"]
    assert operations_between(with_both, {}) == ["qk_norm", "embed_norm"]
    assert operations_between(with_both, model_record(with_both)) == []
    assert operations_between(plain, model_record(with_both)) == []
    stable = GPTConfig(**SHAPE, stable_embedding=True)
    assert operations_between(stable, model_record(plain)) == ["embed_norm"]
    assert operations_between(GPTConfig(**SHAPE, qk_norm="rmsnorm"), model_record(with_both)) == []  # another kind


def test_names():
    block = ["attention.q_norm", "attention.k_norm"]
    expected = [f"blocks.{i}.{part}.{kind}" for i in range(2) for part in block for kind in ("weight", "bias")]
    assert inserted_names(built(**NORMS, bias=True), ["qk_norm"]) == expected
    assert inserted_names(built(qk_norm="l2"), ["qk_norm"]) == [f"blocks.{i}.attention.qk_scale.scale" for i in (0, 1)]


@pytest.mark.parametrize("inserted", [["qk_norm"], ["embed_norm"], ["qk_norm", "embed_norm"]])
def test_the_model_and_its_optimizer_are_those_without_the_norms_and_then_as_before(inserted):
    gpt = built(**NORMS)
    # A group that holds inserted norms alone vanishes whole.
    options = OptimizerOptions(patterns={"blocks.*.attention.?_norm.*": PatternOptions(lr_factor=0.5)})
    optimizer = build_optimizer(gpt, options, 0.1)
    initialise_state(optimizer)
    before = gpt.state_dict().keys()
    groups = [(group["name"], list(group["params"])) for group in optimizer.param_groups]
    states = dict(optimizer.state)
    plain = built(**{name: value for name, value in NORMS.items() if name not in inserted})
    with out_of_sight(gpt, [optimizer], inserted):
        assert gpt.state_dict().keys() == plain.state_dict().keys()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert set(held) == set(gpt.parameters()) == set(optimizer.state)
        assert all(group["params"] for group in optimizer.param_groups)
        optimizer.load_state_dict(optimizer.state_dict())  # which makes other groups
        ids = torch.arange(6)[None]
        assert torch.equal(gpt(ids), plain(ids))
    assert list(gpt.state_dict()) == list(before)
    assert [(group["name"], group["params"]) for group in optimizer.param_groups] == groups
    assert optimizer.state.keys() == states.keys()
    assert all(int(optimizer.state[p]["step"]) == 0 for p in states)


def test_after_an_exception_all_is_back():
    gpt = built(**NORMS)
    optimizer = build_optimizer(gpt, OptimizerOptions(), 0.1)
    names = list(gpt.state_dict())
    with pytest.raises(RuntimeError, match="in between"), out_of_sight(gpt, [optimizer], ["qk_norm", "embed_norm"]):
        raise RuntimeError("in between")
    assert list(gpt.state_dict()) == names
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(gpt.parameters()))
