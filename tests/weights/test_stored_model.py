"""A model out of a checkpoint."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt_run import SaveEveryMicroBatch, fit

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.weights.stored_model import build_model, open_model, write_weights


def test_a_model_comes_back_as_it_was_with_all_its_options(tmp_path):
    config = GPTConfig(
        17, 2, 4, 16, max_length=8, n_kv_head=2, position="rope", norm="rmsnorm", mlp="swiglu", qk_norm="l2", bias=True
    )
    gpt = GPT(config).eval()
    initialise(gpt, 3)
    write_weights(tmp_path / "a.ckpt", config, {n: p.detach() for n, p in gpt.named_parameters()})
    stored = open_model(tmp_path / "a.ckpt")
    assert stored.config.kv_heads == 2
    assert stored.config.hidden == config.hidden
    ids = torch.arange(8)[None] % 17
    assert torch.equal(build_model(stored)(ids), gpt(ids))


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_files_and_sharded_folders_hold_the_weights_that_were_trained(tmp_path, strategy):
    trained = fit(strategy, steps=1, callbacks=(SaveEveryMicroBatch(tmp_path, only=(4,)),))
    path = tmp_path / "m4.ckpt"
    assert path.is_dir() == (strategy == "fsdp2")
    stored = open_model(path)
    assert stored.step == 1
    assert "head.weight" not in stored.names()
    for name in stored.names():
        assert torch.equal(stored.read(name), trained.weights[f"gpt.{name}"])


def test_what_is_no_model_of_ours_is_refused(tmp_path):
    config = GPTConfig(3, 1, 1, 2, max_length=4)
    write_weights(tmp_path / "partial.ckpt", config, {"wte.weight": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"its weight blocks\.0\.\S+ does not belong to its model's options"):
        build_model(open_model(tmp_path / "partial.ckpt"))
    content = torch.load(tmp_path / "partial.ckpt")
    content["lit_stable"]["model"]["novelty"] = 1
    torch.save(content, tmp_path / "newer.ckpt")
    with pytest.raises(ValueError, match=r"has the option novelty, unknown here"):
        open_model(tmp_path / "newer.ckpt")
    del content["lit_stable"]
    torch.save(content, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match=r"does not hold its model's options"):
        open_model(tmp_path / "foreign.ckpt")
