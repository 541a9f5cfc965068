"""Runs of a language model that learns to see, by the command line, on the digits: seconds each."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_recipe import Done, command, write_recipe

from lit_stable.model.loss import sample_losses
from lit_stable.run.past_step import PastStep
from lit_stable.vlm.options import VisionOptions
from lit_stable.vlm.vision import build_vision
from lit_stable.weights.stored_model import build_model, open_model

pytest.importorskip("sklearn")

GPT = {"vocab_size": 257, "n_layer": 2, "n_head": 2, "d_model": 16, "max_length": 32}
FROZEN = [{"modules": ["gpt", "sight.vision"], "norms": "with"}]
RECIPE: dict[str, Any] = {
    "system": "vlm",
    "model": {
        "gpt": GPT,
        "schedule": {"peak": 0.03, "warmup": 1, "horizon": 100, "floor": 0.01},
        "vision": {"n_layer": 1, "n_head": 2, "d_model": 16},
    },
    "data": {"sequence_length": 32, "micro_batch": 4, "global_batch": 8, "validation_windows": 8},
    "trainer": {"max_steps": 6, "log_every_n_steps": 1, "accelerator": "cpu", "devices": 1},
    "validate_every": 6,
    "checkpoints": {"every_steps": 4, "first_step": 2, "keep_last": 9},
    "stability": {"grad_clip": {"max_norm": 1.0}},
}


class Runs:
    """Runs in one folder, each named after its test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "runs"
        self.recipe = folder / "see.yaml"
        self.recipe.write_text(yaml.safe_dump({**RECIPE, "run": {"root": str(self.root)}}))

    def fit(self, name: str, *words: str, sees: bool = True) -> str:
        done = self.command("fit", name, *words, sees=sees)
        assert done.code == 0, done.err
        return done.out

    def command(self, kind: str, name: str, *words: str, sees: bool = True) -> Done:
        backbones = ["--model.language", "language", "--model.vision.run", "vision"] if sees else []
        frozen = ["--stability.layer_norm_freeze.rules", str(FROZEN)] if sees else []
        return command(kind, "--config", self.recipe, "--run.name", name, *backbones, *frozen, *words)

    def state(self, name: str, step: int) -> dict[str, Any]:
        path = self.root / name / "0001" / "checkpoints" / f"step-{step:08}.ckpt"
        return torch.load(path, weights_only=True)

    def weights(self, name: str, step: int) -> dict[str, torch.Tensor]:
        return self.state(name, step)["state_dict"]

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.root / name / "0001" / "csv-01" / "metrics.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a language run on text, a vision run on pairs, and a run that sees by both."""
    folder = tmp_path_factory.mktemp("vlm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_STABLE_CACHE", str(folder / "cache"))
        made = Runs(folder)
        language = write_recipe(folder, "language.yaml", model__gpt=GPT)
        assert command("fit", "--config", language, "--trainer.max_steps", "2").code == 0
        made.fit("vision", "--trainer.max_steps", "2", sees=False)
        made.out = made.fit("sees", "--stability.grad_spike_skip", "{}", *MONITORS)
        yield made


MONITORS = [word for kind in ("activation", "attention") for word in (f"--stability.{kind}_monitor", "{}")]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- V01: what is frozen, what trains ---------------------------------------------------------------------------------


def test_backbones_are_those_of_their_runs_and_stay_so_bit_for_bit(runs):
    language, vision = runs.weights("language", 2), runs.weights("vision", 2)
    for step in (2, 6):
        now = runs.weights("sees", step)
        assert all(torch.equal(now[name], value) for name, value in language.items())
        eyes = {name for name in now if name.startswith("sight.vision")}
        assert eyes
        assert all(torch.equal(now[name], vision[name]) for name in eyes)


def test_all_of_the_new_blocks_trains_and_nothing_else_is_in_the_optimizer(runs):
    before, after = runs.weights("sees", 2), runs.weights("sees", 6)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if name.startswith("sight.blocks")}
    assert re.search(r"^frozen +\d+ .* in no group", runs.out, re.M)
    assert len(runs.state("sees", 6)["optimizer_states"][0]["state"]) == len(moved)
    assert f"initial weights: those of {runs.root}/language" in runs.out


def test_it_begins_with_the_loss_of_the_language_model_alone(runs):
    """The loss of the first step is that of the language backbone on the same captions."""
    past = PastStep(runs.root / "sees" / "0001", 1)
    batch = past.data.stream(start=0).read(torch.arange(8).numpy())
    path = runs.root / "language" / "0001" / "checkpoints" / "step-00000002.ckpt"
    sums, counts = sample_losses(build_model(open_model(path))(batch["input_ids"]), batch["labels"])
    losses = (sums.view(2, 4).sum(1) / counts.view(2, 4).sum(1)).mean()
    first = next(row for row in runs.rows("sees") if row["train/loss"])
    assert float(first["train/loss"]) == pytest.approx(losses.item(), rel=1e-5)


def test_monitors_see_new_blocks_and_backbones_alike(runs):
    """V03: by module and layer, queries, keys, values, outputs and both projections of the MLP."""
    keys = set(runs.rows("sees")[0])
    for layer in ("gpt.blocks.1", "sight.blocks.0", "sight.blocks.1", "sight.vision.blocks.0"):
        for role in ("q", "k", "v", "o", "fc1", "fc2", "residual"):
            assert f"stability/activation_rms/{layer}.{role}" in keys
        assert f"stability/attention_logit_max/{layer}.attention" in keys
    assert {"stability/spikes", "stability/grad_norm"} <= keys


def test_norms_of_the_language_model_are_set_free_on_schedule(runs):
    """V13: nothing moves before, and then nothing but its norms and the new blocks."""
    rules = [
        {"modules": ["gpt", "sight.vision"], "norms": "except"},
        {"modules": ["sight.vision"], "norms": "only"},
        {"modules": ["gpt"], "norms": "only", "stop": 4},
    ]
    out = runs.fit("norms", "--stability.layer_norm_freeze.rules", str(rules))
    assert "steps 4: set free gpt.blocks.0.attention_norm.weight" in out
    begun, before, after = (runs.weights(*place) for place in (("language", 2), ("norms", 4), ("norms", 6)))
    assert all(torch.equal(before[name], begun[name]) for name in begun)
    moved = {name for name in begun if not torch.equal(after[name], begun[name])}
    assert moved == {name for name in begun if "norm" in name}


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_resume_is_bit_identical_and_needs_no_backbone(runs):
    whole = runs.weights("sees", 6)
    words = ["--stability.grad_spike_skip", "{}", *MONITORS]
    gone = ["--model.language", "gone", "--model.vision.run", "gone"]
    runs.fit(
        "again", *words, *gone, "--ckpt_path", str(runs.root / "sees" / "0001" / "checkpoints" / "step-00000002.ckpt")
    )
    assert same(runs.weights("again", 6), whole)
    first, second = ([row["train/loss"] for row in runs.rows(name) if row["train/loss"]] for name in ("sees", "again"))
    assert second == first[-4:]


def test_a_new_run_begins_with_the_weights_of_another(runs):
    words = ["--ckpt_path", "sees@6", "--ckpt_part", "weights", "--trainer.max_steps", "2"]
    runs.fit("weights", *words, "--checkpoints.first_step", "1", "--model.schedule.warmup", "2")
    assert same(runs.weights("weights", 1), runs.weights("sees", 6))  # the rate of the first step is 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.gated.qk_norm", "rmsnorm", "--ckpt_path", "sees@4"], "qk_norm=rmsnorm: the checkpoint has none"),
        (["--model.gated.mlp", "relu", "--ckpt_path", "sees@4"], "model.gated.mlp=relu: the checkpoint has gelu"),
        (["--model.language", "nobody"], r"model.language=nobody: neither a checkpoint nor a run .* hf_vlm/nobody"),
        (["--model.vision.run", "language"], "model.vision.run=language: .* holds no vision backbone"),
        (["--model.vision.d_model", "32"], "model.vision.d_model=32: that of .* has 16"),
        (["--model.gpt.norm", "rmsnorm"], "model.gpt.norm=rmsnorm: the checkpoint is of a model with layernorm"),
        (["--model.vision.image_size", "4"], "model.vision.image_size=4, channels=1: the data's images have 8"),
        (["--model.gated.first", "2"], "model.gated.first=2: the language model has layers 0 to 1"),
        (["--model.gated.every", "0", "--data.micro_batch", "3"], r"model.gated.every=0.*\n.*data.micro_batch=3"),
        (["--mesh.tensor_parallel", "2", "--trainer.strategy", "fsdp2"], "tensor_parallel=2: new blocks and vision"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(runs, words, said):
    done = runs.command("fit", "refused", *words)
    assert done.code in (1, 2)
    assert re.search(said, done.err), done.err
    assert not (runs.root / "refused").exists()


# -- other commands ---------------------------------------------------------------------------------------------------


def test_check_says_what_trains_and_what_is_frozen(runs):
    page = runs.command("check", "sees").out
    assert re.search(r"^parameters: [\d,]+ \(language [\d.]+k, new_blocks [\d.]+k, vision [\d.]+k\)", page, re.M)
    assert re.search(r"^frozen .* in no group", page, re.M)
    assert "sight.blocks.0.attention.q.weight" in page
    assert "data.sources.pairs: " in page
    trains, states = (re.search(rf"{kind} ([\d.]+) KiB", page)[1] for kind in ("gradients", "optimizer states"))
    assert float(states) == pytest.approx(2 * float(trains), rel=0.01)


def test_captions_are_printed_beside_their_images(runs):
    done = command("caption", "sees@6", "--root", runs.root, "--count", "3")
    assert done.code == 0, done.err
    truths = re.findall(r"^(a \w+ \w+, .*)\n  -> ", done.out, re.M)
    assert len(truths) == 3
    assert len(re.findall(r"^[ .:=+*#%@-]{16}$", done.out, re.M)) == 24
    refused = command("caption", "language@2", "--root", runs.root)
    assert "is of a model that does not see" in refused.err


def test_a_past_step_can_be_dumped_and_replayed(runs):
    folder = runs.root / "sees" / "0001"
    dumped = command("dump-batch", folder, "--step", "3", "--text")
    assert dumped.code == 0, dumped.err
    assert "leaning" in dumped.out
    replayed = command("replay", folder, "--step", "3")
    assert replayed.code == 0, replayed.err
    assert re.search(r"^same: .* loss and gradient norm to the bit$", replayed.out, re.M), replayed.out


# -- backbones of others ----------------------------------------------------------------------------------------------


def vit_folder(folder: Path, **settings: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**{**sizes, "image_size": 16, "patch_size": 8, **settings})
    transformers.ViTModel(config).save_pretrained(folder)
    return folder


def test_a_vision_model_of_transformers_can_be_the_eyes(runs, tmp_path):
    auto_model = pytest.importorskip("transformers").AutoModel
    folder, moved = vit_folder(tmp_path / "vit"), tmp_path / "moved"
    stored = auto_model.from_pretrained(folder).state_dict()
    where = ["--model.vision.run", "null", "--model.vision"]
    runs.fit("hf", *where, str({"hf": str(folder)}), "--trainer.max_steps", "2")
    after = runs.weights("hf", 2)
    assert all(torch.equal(after[f"sight.vision.model.{name}"], value) for name, value in stored.items())
    captions = command("caption", "hf@2", "--root", runs.root, "--count", "1")
    assert captions.code == 0
    refused = runs.command("fit", "refused", *where, str({"hf": str(tmp_path)}))
    assert f"model.vision.hf={tmp_path}: cannot be read" in refused.err

    folder.rename(moved)
    assert command("caption", "hf@2", "--root", runs.root, "--count", "1").out == captions.out, "needs no folder"
    refused = runs.command("fit", "refused", *where, str({"hf": str(folder)}))
    assert f"model.vision.hf={folder}: is no folder; give the one that" in refused.err
    go_on = ["--resume", "auto", "--trainer.max_steps", "3"]
    said = runs.fit("hf", *where, str({"hf": str(moved)}), *go_on)
    assert f"changed since the checkpoint: model.vision.hf: {folder} -> {moved}" in said
    assert (runs.root / "hf" / "0001" / "checkpoints" / "step-00000003.ckpt").exists(), "no branch of it"
    other = vit_folder(tmp_path / "other", hidden_act="relu")
    refused = runs.command("fit", "hf", *where, str({"hf": str(other)}), *go_on[:3], "4")
    assert "its config.json has hidden_act relu, and the checkpoint is of a model that has gelu" in refused.err


def test_images_of_other_channels_than_a_vision_model_sees_are_refused(tmp_path):
    folder = vit_folder(tmp_path / "grey", num_channels=1)
    assert build_vision(VisionOptions(hf=str(folder), channels=1))(torch.zeros(2, 1, 8, 8)).shape[0] == 2
    with pytest.raises(ValueError, match=r"^model.vision.channels=3: the model in \S+ sees 1; set"):
        build_vision(VisionOptions(hf=str(folder), channels=3))
