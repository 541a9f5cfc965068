"""Other backbones than those that the captions begin with, trained at their own small shape for two steps each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_recipe import Done, command

pytest.importorskip("sklearn")

STEPS = 2


class Backbones:
    """Runs of `hf_vlm/` in one folder, each under the name of its recipe."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def command(self, recipe: str, *words: str) -> Done:
        few = ["--data.micro_batch", "2", "--data.global_batch", "2", "--data.validation_windows", "2"]
        steps = ["--trainer.max_steps", str(STEPS), "--validate_every", "1000", "--checkpoints.first_step", "null"]
        return command("fit", "--config", f"hf_vlm/{recipe}", "--run.root", self.root, *few, *steps, *words)

    def fit(self, recipe: str, *words: str) -> str:
        done = self.command(recipe, *words)
        assert done.code == 0, done.err
        return done.out

    def weights(self, run: str, part: str, step: int = STEPS) -> dict[str, torch.Tensor]:
        path = self.root / run / "0001" / "checkpoints" / f"step-{step:08}.ckpt"
        state: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
        return {name: tensor for name, tensor in state.items() if name.startswith(part)}

    def assert_frozen(self, part: str, run: str, of: str, step: int = STEPS) -> None:
        mine, theirs = self.weights(run, part), self.weights(of, part, step)
        assert mine
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> Backbones:
    made = Backbones(tmp_path_factory.mktemp("backbones") / "runs")
    made.fit("language", "--trainer.precision", "16-mixed")
    made.fit("vision")
    return made


def test_a_language_model_of_fp16_goes_on_in_bf16_before_it_learns_to_see(backbones: Backbones) -> None:
    """V04. In the words of the recipe."""
    said = backbones.fit("language_bf16", "--ckpt_path", f"language@{STEPS}", "--trainer.max_steps", str(STEPS + 1))
    assert "loss scale: 65536 of the checkpoint dropped; bf16-mixed needs none" in said
    before, after = backbones.weights("language", "gpt."), backbones.weights("language_bf16", "gpt.", STEPS + 1)
    assert not any(torch.equal(before[name], after[name]) for name in before), "on text it learns as a whole"
    backbones.fit("captions", "--model.language", "language_bf16")
    backbones.assert_frozen("gpt.", "captions", of="language_bf16", step=STEPS + 1)


def test_the_same_eyes_look_through_another_language_model(backbones: Backbones) -> None:
    """V17."""
    backbones.fit("language_wide")
    backbones.fit("other_language")
    backbones.assert_frozen("gpt.", "other_language", of="language_wide")
    backbones.assert_frozen("sight.vision.", "other_language", of="vision")
    refused = backbones.command("other_language", "--model.language", "language", "--run.name", "mixed_up")
    assert refused.code == 1
    assert "is of another model: gpt.wte.weight has shape (257, 96)" in refused.err


def test_the_same_language_model_looks_through_a_larger_vision_backbone(backbones: Backbones) -> None:
    """V18."""
    backbones.fit("vision_large")
    backbones.fit("larger_vision")
    backbones.assert_frozen("gpt.", "larger_vision", of="language")
    backbones.assert_frozen("sight.vision.", "larger_vision", of="vision_large")
    size, larger = (
        sum(tensor.numel() for tensor in backbones.weights(run, "sight.vision.").values())
        for run in ("vision", "larger_vision")
    )
    assert larger > 2 * size
    refused = backbones.command("larger_vision", "--model.vision.run", "vision", "--run.name", "mixed_up")
    assert refused.code != 0
    assert "model.vision.n_layer=4: that of" in refused.err
