"""Where a problem comes from."""

from __future__ import annotations

import pytest

from lit_stable.cli.places import located
from lit_stable.cli.recipe import expand

BASE = "model:\n  gpt: {d_model: 3}\n  schedule:\n    peak: 1\nstability:\n  grad_clip:\n    max_norm: 0\n"
CHILD = "base: base.yaml\nmodel: {schedule: {peak: 2}}\nstability:\n  lr_override: {init_args: {factor: -1}}\n"
CHILD += "  detectors: {plateau: {patience: 0}}\ncontrol: {every_steps: 0}\n"


@pytest.fixture
def where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "child.yaml").write_text(CHILD)
    layers = expand(tmp_path / "child.yaml")

    def where(problem: str, *argv: str) -> str:
        (line,) = located([problem], layers, argv)
        assert line.endswith(problem)
        return line.removesuffix(problem).replace(f"{tmp_path}/", "")

    return where


@pytest.mark.parametrize(
    ("problem", "place"),
    [
        ("model.gpt.d_model=3: must be even.", "base.yaml:2: "),
        ("model.schedule.peak=2: must be less.", "child.yaml:2: "),
        ("model.gpt: must be.", "base.yaml:2: "),
        ("model.gpt.n_layer=12: is the default.", ""),
        ("`GradClip(max_norm=0)`: must be > 0.", "base.yaml:7: "),
        ("`GradClip`: schedule must rise.", "base.yaml:6: "),
        ("`LROverride(factor=-1)`: must be >= 0.", "child.yaml:4: "),
        ("`Plateau(patience=0)`: must be at least 1.", "child.yaml:5: "),
        ("`RunControl(every_steps=0)`: must be at least 1.", "child.yaml:6: "),
        ("`ZClip(decay=2)`: is no feature by itself.", ""),
        ("GradClip: stands in trainer.callbacks.", ""),
        ("The strategy `fsdp` requires a GPU.", ""),
    ],
)
def test_a_problem_has_the_line_of_the_last_recipe_that_set_its_value(where, problem, place):
    assert where(problem) == place


def test_what_was_typed_has_no_line(where):
    problem = "model.schedule.peak=3: must be less."
    assert where(problem, "--model.schedule.peak", "3") == ""
    assert where(problem, "--model.schedule.peak=3") == ""
    assert where(problem, "--model.schedule.floor", "3") == "child.yaml:2: "
    assert where("`GradClip(max_norm=3)`: must.", "--stability.grad_clip.max_norm", "3") == ""
