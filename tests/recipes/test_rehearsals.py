"""Runs that go on from another run, end to end at toy size: one of each kind."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_recipe import command, write_store

from lit_stable.run.folder import checkpoints


class Rehearsal:
    """Toys of recipes on a small text, in one folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "runs"
        self.words = ["--data.sources", f"{{text: {{path: {write_store(folder)}}}}}", "--run.root", self.root]
        self.words += ["--data.validation_windows", "4", "--validate_every", "1000"]

    def fit(self, recipe: str, last: int, *words: str) -> str:
        toy = ["--config", recipe, "--config", "sizes/tiny", "--trainer.max_steps", str(last)]
        done = command("fit", *toy, *self.words, *words)
        assert done.code == 0, done.err
        return done.out

    def folder(self, recipe: str) -> Path:
        name = recipe.replace("/", "-") if "exp" in recipe else recipe.split("/")[1]
        return self.root / f"{name}-tiny" / "0001"

    def state(self, recipe: str, step: int) -> dict[str, Any]:
        path = next(p for p in checkpoints(self.folder(recipe)) if p.stem == f"step-{step:08}")
        return torch.load(path, weights_only=True)

    def column(self, recipe: str, name: str) -> dict[int, float]:
        with (self.folder(recipe) / "csv-01" / "metrics.csv").open() as file:
            return {int(float(row["step"])): float(row[name]) for row in csv.DictReader(file) if row.get(name)}

    def parent(self, recipe: str) -> dict[str, Any]:
        return yaml.safe_load((self.folder(recipe) / "parent.yaml").read_text())


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return Rehearsal(tmp_path_factory.mktemp("rehearsals"))


def test_another_rate_and_a_reshuffle_and_an_fp32_head(toys):
    """v1.1 and v1.3 of BloombergGPT from 10.8k of v1.0: step 9 of the toy."""
    toys.fit("bloomberggpt/v1.0", 11)
    said = toys.fit("bloomberggpt/v1.1", 11, "--ckpt_path", "v1.0-tiny@9")
    assert "stability.lr_override: None -> LROverride(" in said
    assert toys.parent("bloomberggpt/v1.1")["step"] == 9
    before, after = (toys.column(f"bloomberggpt/v1.{n}", "stability/lr" if n else "lr") for n in (0, 1))
    assert after[max(after)] == pytest.approx(0.8 * before[max(after)], rel=1e-5)
    weights = [toys.state(f"bloomberggpt/v1.{n}", 11)["state_dict"]["gpt.wte.weight"] for n in (0, 1)]
    assert not torch.equal(*weights)
    assert "gpt.head_fp32: False -> True" in toys.fit("bloomberggpt/v1.3", 11, "--ckpt_path", "v1.0-tiny@9")
    head, headless = (toys.state(f"bloomberggpt/v1.{n}", 11)["state_dict"] for n in (3, 0))
    assert head.keys() == headless.keys()  # and in fp32, as toys are, the same numbers


def test_relu_in_place_of_gelu_and_a_scale_before_the_product(toys):
    """OPT's run 11.10 out of run 11, in mid-run."""
    toys.fit("opt/11", 3, "--trainer.precision", "16-mixed")
    said = toys.fit("opt/11.10", 4, "--trainer.precision", "16-mixed", "--ckpt_path", "11-tiny@3")
    assert "gpt.mlp: gelu -> relu" in said
    assert "gpt.attention_scale: post -> pre_sqrt" in said
    event = json.loads((toys.folder("opt/11.10") / "events.jsonl").read_text().splitlines()[0])
    assert (event["kind"], event["step"], event["evidence"]["swapped"]) == ("surgery", 4, "gelu -> relu")
    steps = {int(state["step"]) for state in toys.state("opt/11.10", 4)["optimizer_states"][0]["state"].values()}
    assert max(steps) == 4


def test_data_left_out_then_a_reset_of_the_optimizer(toys):
    """Embedding norm 1, from 13250 of it 2, from 16800 of that 6: steps 10 and 13 of the toy."""
    toys.fit("tr8b_embed_norm/exp1", 10)
    said = toys.fit("tr8b_embed_norm/exp2", 13, "--ckpt_path", "tr8b_embed_norm-exp1-tiny@10")
    assert "data.skip_steps: None -> ['11-11']" in said
    said = toys.fit("tr8b_embed_norm/exp6", 16, "--ckpt_path", "tr8b_embed_norm-exp2-tiny@13")
    assert "optimizer" in said
    held = toys.column("tr8b_embed_norm/exp6", "stability/optimizer_held")
    assert list(held.values()) == [1.0, 0.0, 0.0]
    before, after = toys.state("tr8b_embed_norm/exp2", 13), toys.state("tr8b_embed_norm/exp6", 14)
    assert all(torch.equal(before["state_dict"][name], after["state_dict"][name]) for name in before["state_dict"])
    steps = [state["step"].item() for state in after["optimizer_states"][0]["state"].values()]
    assert set(steps) == {1.0}


def test_a_schedule_overridden_with_8_bit_moments(toys):
    """Bitsandbytes 6 from 12000 of 5: step 9 of the toy."""
    toys.fit("tr8b_bitsandbytes/exp5", 10)
    toys.fit("tr8b_bitsandbytes/exp6", 10, "--ckpt_path", "tr8b_bitsandbytes-exp5-tiny@9")
    columns = [toys.column(f"tr8b_bitsandbytes/exp{n}", "lr") for n in (5, 6)]
    before, after = (column[max(column)] for column in columns)
    assert after < 0.1 * before  # at toy size the step behind 9 is near the end of the horizon that is a tenth as long
    assert toys.column("tr8b_bitsandbytes/exp6", "stability/override_lr")[max(columns[1])] == after
    assert toys.parent("tr8b_bitsandbytes/exp6")["step"] == 9
    bytes_each = toys.column("tr8b_bitsandbytes/exp6", "stability/state_bytes_per_parameter")
    assert all(value < 8 for value in bytes_each.values())


def test_16_bit_then_bf16(toys):
    """OPT's run 12 in fp16, then in bf16. On one device fp16 is `16-mixed`: `16-true` needs shards."""
    toys.fit("opt/12", 3, "--trainer.precision", "16-mixed")
    words = ["--trainer.precision", "bf16-mixed", "--ckpt_path", "12-tiny@3"]
    said = toys.fit("opt/12_bf16", 5, *words)
    assert "of the checkpoint dropped; bf16-mixed needs none" in said
    assert "stability.grad_spike_skip: GradSpikeSkip(" in said
    assert (toys.state("opt/12", 3)["optimizer_states"][0]["state"][0]["step"]).item() <= 3
