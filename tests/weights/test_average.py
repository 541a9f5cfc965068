"""Means of weights by value, and what is done with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_recipe import command

from lit_stable.model.config import GPTConfig
from lit_stable.weights.average import average
from lit_stable.weights.stored_model import open_model, write_weights

SMALL = GPTConfig(vocab_size=3, n_layer=1, n_head=1, d_model=2, max_length=4)


def stored(folder: Path, name: str, values: list[float], config: GPTConfig = SMALL, **weights: torch.Tensor) -> Path:
    path = folder / f"{name}.ckpt"
    write_weights(path, config, {"wte.weight": torch.tensor(values), **weights})
    return path


def test_a_uniform_and_a_weighted_mean_by_hand(tmp_path):
    paths = [stored(tmp_path, name, values) for name, values in {"a": [1.0, 8.0], "b": [2.0, -4.0]}.items()]
    average(paths, tmp_path / "even.ckpt")
    lines = average(paths, tmp_path / "uneven.ckpt", [3, 1])
    assert open_model(tmp_path / "even.ckpt").read("wte.weight").tolist() == [1.5, 2.0]
    assert open_model(tmp_path / "uneven.ckpt").read("wte.weight").tolist() == [1.25, 5.0]
    assert lines[0] == f"{paths[0]}: step 0, share 0.75"
    assert "Optimizer state is not averaged" in lines[-1]


def test_the_mean_of_equal_weights_is_those_weights_and_of_bf16_is_rounded_once(tmp_path):
    values = torch.randn(1000).tolist()
    paths = [stored(tmp_path, name, values) for name in "abc"]
    average(paths, tmp_path / "mean.ckpt")
    assert open_model(tmp_path / "mean.ckpt").read("wte.weight").tolist() == torch.tensor(values).tolist()
    halves = []
    for name, value in (("d", 256.0), ("e", 1.0), ("f", 1.0)):  # in bf16 256 + 1 is 256
        halves.append(tmp_path / f"{name}.ckpt")
        write_weights(halves[-1], SMALL, {"wte.weight": torch.tensor([value], dtype=torch.bfloat16)})
    average(halves, tmp_path / "halves.ckpt", [1, 2, 2])
    mean = open_model(tmp_path / "halves.ckpt").read("wte.weight")
    assert mean.dtype == torch.bfloat16
    assert mean.item() == 52.0


def test_a_checkpoint_with_share_0_leaves_no_trace_of_its_nan(tmp_path):
    paths = [stored(tmp_path, "a", [1.0]), stored(tmp_path, "b", [float("nan")])]
    average(paths, tmp_path / "mean.ckpt", [1, 0])
    assert open_model(tmp_path / "mean.ckpt").read("wte.weight").tolist() == [1.0]


def test_what_has_no_mean_is_refused(tmp_path):
    a, b = stored(tmp_path, "a", [1.0]), stored(tmp_path, "b", [1.0, 2.0])
    rope = stored(tmp_path, "rope", [1.0], GPTConfig(3, 1, 1, 2, max_length=4, position="rope"))
    out = tmp_path / "out.ckpt"
    with pytest.raises(ValueError, match=r"takes two or more"):
        average([a], out)
    with pytest.raises(ValueError, match=r"shares=\[1\]: there are 2 checkpoints"):
        average([a, b], out, [1])
    with pytest.raises(ValueError, match=r"must be finite numbers of 0 or more"):
        average([a, a], out, [1, -1])
    for shares in ([1e308, 1e308], [5e-324, 5e-324], [1, 1e-200]):
        with pytest.raises(ValueError, match=r"those above 0 must lie between 1e-100 and 1e\+100"):
            average([a, a], out, shares)
    with pytest.raises(ValueError, match=r"out=\S+a\.ckpt/x\.ckpt: cannot be written, since \S+a\.ckpt is a file"):
        average([a, a], a / "x.ckpt")
    with pytest.raises(ValueError, match=r"b\.ckpt: is not of the model of .*\(wte\.weight \(1,\) and \(2,\)\)"):
        average([a, b], out)
    with pytest.raises(ValueError, match=r"rope\.ckpt: is not of the model .* \(gpt\.position=learned\)"):
        average([a, rope], out)
    with pytest.raises(ValueError, match=r"a\.ckpt: exists already"):
        average([a, a], a)
    assert not out.exists()


def test_an_average_validates_and_begins_a_new_run_and_is_no_place_to_go_on_from(run, recipe, tmp_path):
    mean = tmp_path / "mean.ckpt"
    done = command("average", f"{run}@2", f"{run}@4", run, "--out", mean)
    assert done.code == 0, done.err
    models = [open_model(run / "checkpoints" / f"step-0000000{step}.ckpt") for step in (2, 4, 6)]
    averaged = open_model(mean)
    for name in averaged.names():
        expected = torch.stack([model.read(name).double() for model in models]).mean(0).float()
        torch.testing.assert_close(averaged.read(name), expected, rtol=1e-7, atol=0)
    assert [part["step"] for part in averaged.record["averaged"]] == [2, 4, 6]
    validated = command("validate", "--config", recipe, "--ckpt_path", mean)
    assert validated.code == 0, validated.err
    assert "validation text: loss" in validated.out
    refused = command("fit", "--config", recipe, "--ckpt_path", mean)
    assert refused.code == 1
    assert "holds weights and no optimizer state" in refused.err
    assert "--ckpt_part weights" in refused.err
    words = ("--ckpt_part", "weights", "--run.name", "begun", "--trainer.max_steps", "1")
    begun = command("fit", "--config", recipe, "--ckpt_path", mean, *words)
    assert begun.code == 0, begun.err
    assert f"initial weights: those of {mean}" in begun.out
    after = open_model(run.parent.parent / "begun" / "0001" / "checkpoints" / "step-00000001.ckpt")
    for name in after.names():  # its first step has rate 0
        assert torch.equal(after.read(name), averaged.read(name))
