"""Norms inserted into a run: by value, on one process, from files and folders."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from surgery_fits import BEFORE, BOTH, END, NEW, NORMS, before, operated, within
from tiny_gpt_run import LENGTH, equal_bits, fit, sample
from tiny_recipe import command, write_recipe

from lit_stable.callbacks import EightBitAdam
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.model.config import GPTConfig
from lit_stable.model.loss import sample_losses
from lit_stable.run.surgery import Surgery, SurgeryOptions, refuse_idle_surgery
from lit_stable.weights.stored_model import build_model, open_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: before(tmp_path_factory.mktemp(kind), kind) for kind in ("auto", "fsdp2", "fsdp2_full")}


def is_new(name: str) -> bool:
    return any(part in name for part in NEW)


@pytest.mark.parametrize("moments", ["keep", "reset"])
@pytest.mark.parametrize(
    ("source", "strategy"), [("auto", "auto"), ("auto", "fsdp2"), ("fsdp2", "fsdp2"), ("fsdp2_full", "fsdp2")]
)
def test_old_weights_stay_new_gains_are_one_and_moments_are_as_asked(checkpoints, source, strategy, moments):
    options = SurgeryOptions(BOTH, moments, rewarmup=4)
    run, look = operated(checkpoints[source], strategy, options, steps=BEFORE + 3)
    stored = open_model(checkpoints[source])
    names = [name.removeprefix("gpt.") for name in look.weights]
    assert {name for name in names if not is_new(name)} == set(stored.names())
    assert sum(map(is_new, names)) == 2 + 2 * 2 * 2
    for name in names:
        weight, moment = look.weights[f"gpt.{name}"], look.moments[f"gpt.{name}"]
        if is_new(name):
            assert torch.equal(weight, torch.zeros_like(weight) if name.endswith("bias") else torch.ones_like(weight))
        else:
            assert torch.equal(weight, stored.read(name))
        fresh = is_new(name) or moments == "reset"
        assert look.counts[f"gpt.{name}"] == (0 if fresh else BEFORE)
        assert bool(moment.any()) != fresh
    assert look.factors == [0.0, 0.25, 0.5]
    assert {int(s["step"]) for s in run.trainer.optimizers[0].state.values()} == ({3} if moments == "reset" else {3, 6})


def test_kept_moments_are_those_of_the_same_parameters(checkpoints):
    content = torch.load(checkpoints["auto"])
    saved = {
        name: content["optimizer_states"][0]["state"][number]["exp_avg_sq"]
        for names, group in zip(
            content["lit_stable"]["parameters"][0], content["optimizer_states"][0]["param_groups"], strict=True
        )
        for name, number in zip(names, group["params"], strict=True)
    }
    for source, strategy in (("auto", "auto"), ("auto", "fsdp2")):
        _, look = operated(checkpoints[source], strategy, steps=BEFORE + 1)
        for name, moment in saved.items():
            assert torch.equal(look.moments[name], moment)


def test_the_first_loss_is_that_of_the_old_weights_with_the_norms_and_the_first_step_moves_nothing(checkpoints):
    run, look = operated(checkpoints["auto"], steps=BEFORE + 1)
    old = build_model(open_model(checkpoints["auto"]))
    new = type(old)(run.module.config).eval()
    filled = {
        name: torch.ones_like(p) if name.endswith("weight") else torch.zeros_like(p)
        for name, p in new.named_parameters()
    }
    new.load_state_dict({**filled, **old.state_dict()})
    tokens = torch.stack([sample(number) for number in range(8 * BEFORE, 8 * BEFORE + 8)])
    losses = []
    for gpt in (old, new):
        sums, counts = sample_losses(gpt(tokens[:, :-1]), tokens[:, 1:])
        losses.append(float(sums.sum() / counts.sum()))
    assert run.rows[0][1] == pytest.approx(losses[1], rel=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-3  # the function has changed
    assert equal_bits(run.weights, look.weights)


def test_a_resume_within_the_rise_is_bit_equal_with_the_key_and_without(checkpoints, tmp_path):
    straight, look = operated(checkpoints["auto"], folder=tmp_path)
    assert look.factors == [0.0, 0.25, 0.5, 0.75]
    for options in (None, SurgeryOptions()):
        resumed, again = operated(within(tmp_path), options=options)
        assert equal_bits(resumed.weights, straight.weights)
        assert again.factors == [0.5, 0.75]
        assert again.counts["gpt.embed_norm.weight"] == 2
    assert [row[0] for row in straight.rows] == list(range(BEFORE + 1, END + 1))


def test_without_a_rise_the_rate_is_the_schedules_and_one_norm_may_come_alone(checkpoints):
    _, look = operated(checkpoints["auto"], options=SurgeryOptions(["qk_norm"], rewarmup=0), embed_norm=False)
    assert look.factors == [1.0] * 4
    assert not any("embed_norm" in name for name in look.weights)


def test_a_run_that_has_the_norms_already_is_not_operated_on(tmp_path):
    path = before(tmp_path, **{k: v for k, v in NORMS.items() if k != "bias"})
    straight = fit(steps=BEFORE + 2, **NORMS)
    resumed, look = operated(path, steps=BEFORE + 2)
    assert equal_bits(resumed.weights, straight.weights)
    assert look.factors == []


def test_eight_bit_moments_are_kept_too(tmp_path):
    path = before(tmp_path, nan=EightBitAdam())
    surgery = Surgery(SurgeryOptions(["qk_norm"], rewarmup=2))
    run = fit(
        steps=BEFORE + 2,
        ckpt_path=path,
        nan=EightBitAdam(),
        callbacks=(surgery,),
        bias=True,
        qk_norm="rmsnorm",
    )
    counts = {
        name: int(run.trainer.optimizers[0].state[parameter]["step"])
        for name, parameter in run.module.named_parameters()
    }
    assert {count for name, count in counts.items() if is_new(name)} == {2}
    assert {count for name, count in counts.items() if not is_new(name)} == {BEFORE + 2}


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
@pytest.mark.parametrize(
    ("options", "changes", "text"),
    [
        (SurgeryOptions(), {}, r"qk_norm=layernorm: .* insert the norm by surgery: \{insert: \[qk_norm\]\}"),
        (SurgeryOptions(["embed_norm"]), {}, r"^model\.gpt\.qk_norm=layernorm: the checkpoint is of a model with none"),
        (SurgeryOptions(BOTH), {"norm_gain": "zero_centred"}, r"^model\.gpt\.norm_gain=zero_centred"),
    ],
)
def test_anything_else_is_refused(checkpoints, strategy, options, changes, text):
    with pytest.raises(MisconfigurationException, match=text):
        operated(checkpoints[strategy], strategy, options, **changes)


def test_what_fsdp1_flattens_is_not_operated_on(checkpoints, monkeypatch):
    monkeypatch.setattr("lit_stable.run.surgery.has_fsdp1", lambda model: True)
    with pytest.raises(
        MisconfigurationException,
        match=r"surgery\.insert=\['qk_norm', 'embed_norm'\]: FSDP1 flattens what it shards; take .* fsdp2 or ddp",
    ):
        operated(checkpoints["auto"])


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_unit_length_and_a_stable_embedding_are_inserted_with_what_a_new_run_has(checkpoints, strategy):
    norms = {"qk_norm": "l2", "embed_norm": False, "stable_embedding": True}
    run, look = operated(checkpoints["auto"], strategy, steps=BEFORE + 2, **norms)
    stored = open_model(checkpoints["auto"])
    new = {name.removeprefix("gpt."): weight for name, weight in look.weights.items()}
    for name in stored.names():  # the table too: its law is one of new runs
        assert torch.equal(new.pop(name), stored.read(name))
    scales = [new.pop(f"blocks.{layer}.attention.qk_scale.scale") for layer in range(2)]
    assert torch.stack(scales).flatten().tolist() == pytest.approx([math.log2(LENGTH**2 - LENGTH)] * 2)
    assert new.keys() == {"embed_norm.weight", "embed_norm.bias"}
    assert not equal_bits(run.weights, look.weights)
    counts = {name: count for name, count in look.counts.items() if name.endswith(("scale", "embed_norm.weight"))}
    assert set(counts.values()) == {0}
    assert len(counts) == 3


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_an_activation_is_swapped_under_weights_and_moments_that_stay(checkpoints, strategy, tmp_path):
    options = SurgeryOptions(swap=["activation"], rewarmup=2)
    plain = {"qk_norm": "none", "embed_norm": False}
    with pytest.raises(MisconfigurationException, match=r"mlp=relu: .* swap it by surgery: \{swap: \[activation\]\}"):
        operated(checkpoints[strategy], strategy, SurgeryOptions(BOTH), mlp="relu")
    run, look = operated(checkpoints[strategy], strategy, options, tmp_path, mlp="relu", **plain)
    stored = open_model(checkpoints[strategy])
    for name in stored.names():
        assert torch.equal(look.weights[f"gpt.{name}"], stored.read(name))
    assert set(look.counts.values()) == {BEFORE}
    assert look.factors == [0.0, 0.5, 1.0, 1.0]
    relu = build_model(replace(stored, config=replace(stored.config, mlp="relu")))
    tokens = torch.stack([sample(number) for number in range(8 * BEFORE, 8 * BEFORE + 8)])
    sums, counts = sample_losses(relu(tokens[:, :-1]), tokens[:, 1:])
    assert run.rows[0][1] == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)
    resumed, again = operated(within(tmp_path), strategy, SurgeryOptions(), mlp="relu", **plain)
    assert equal_bits(resumed.weights, run.weights)
    assert again.factors == [1.0, 1.0]


def test_nothing_is_taken_out_and_no_kind_is_exchanged(tmp_path):
    path = before(tmp_path, **{k: v for k, v in NORMS.items() if k != "bias"})
    for changes, text in (
        ({"qk_norm": "none"}, r"qk_norm=none: the checkpoint is of a model with layernorm"),
        ({"qk_norm": "rmsnorm"}, r"qk_norm=rmsnorm: the checkpoint is of a model with layernorm"),
        ({"embed_norm": False}, r"embed_norm=False: the checkpoint is of a model with True"),
    ):
        with pytest.raises(MisconfigurationException, match=text) as refused:
            operated(path, options=SurgeryOptions(BOTH), **changes)
        assert "surgery" not in str(refused.value)


def test_options_out_of_range_and_idle_ones_are_refused():
    with pytest.raises(ValueError, match=r"surgery\.rewarmup=-1: must be 0 or more"):
        SurgeryOptions(rewarmup=-1)
    with pytest.raises(ValueError, match=r"names a norm twice"):
        SurgeryOptions(["qk_norm", "qk_norm"])
    with pytest.raises(ValueError, match=r"surgery\.swap=\['activation', 'activation'\]: names it twice"):
        SurgeryOptions(swap=["activation", "activation"])
    with pytest.raises(ValueError, match=r"model\.gpt\.mlp=swiglu has matrices of its own, .* gelu, gelu_tanh, relu\."):
        refuse_idle_surgery(SurgeryOptions(swap=["activation"]), GPTConfig(mlp="swiglu"))
    with pytest.raises(ValueError, match=r"model\.gpt\.qk_norm=none, so there is nothing to insert"):
        refuse_idle_surgery(SurgeryOptions(["qk_norm"]), GPTConfig())


def test_the_command_line_records_it_in_a_branch_that_goes_on(tmp_path):
    recipe = write_recipe(tmp_path, checkpoints={"every_steps": 2, "first_step": 2, "keep_last": 5})
    assert command("fit", "--config", recipe, "--trainer.max_steps", "4").code == 0
    runs = tmp_path / "runs" / "tiny"
    norm = ("--model.gpt.qk_norm", "rmsnorm", "--config", recipe)
    surgery = ("--surgery.insert", "[qk_norm]", "--surgery.rewarmup", "3")
    idle = command("fit", "--config", recipe, *surgery, "--ckpt_path", runs / "0001")
    assert (idle.code, "so there is nothing to insert" in idle.err) == (2, True)
    fresh = command("fit", *norm, *surgery)
    assert (fresh.code, "is done on a checkpoint; give --ckpt_path" in fresh.err) == (2, True)
    refused = command("fit", *norm, "--ckpt_path", runs / "0001")
    assert (refused.code, "by surgery: {insert: [qk_norm]}" in refused.err) == (2, True)
    done = command("fit", *norm, *surgery, "--ckpt_path", runs / "0001", "--trainer.max_steps", "6")
    assert done.code == 0, done.err
    event = json.loads((runs / "0002" / "events.jsonl").read_text().splitlines()[0])
    assert (event["kind"], event["step"]) == ("surgery", 5)
    assert event["evidence"]["parameters"] == [f"blocks.0.attention.{x}_norm.weight" for x in "qk"]
    assert "model.gpt.qk_norm: none -> rmsnorm" in (runs / "0002" / "parent.yaml").read_text()
    again = command("fit", *norm, "--resume", "auto", "--trainer.max_steps", "7")
    assert again.code == 0, again.err
    assert "step 7/7" in again.out
    assert not (runs / "0003").exists()
    weights = ("--ckpt_path", runs / "0001", "--ckpt_part", "weights", "--trainer.max_steps", "1", "--run.name", "new")
    begun = command("fit", *norm, *surgery, *weights)
    assert begun.code == 0, begun.err
