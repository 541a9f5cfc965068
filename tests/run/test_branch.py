"""Which changes make another run, and how they are told."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import yaml

from lit_stable.run.branch import (
    _THE_SAME_RUN,
    Parent,
    changes,
    is_another_run,
    read_parent,
    remarkable_changes,
    run_folder_of,
    stored_recipes,
    write_parent,
)
from lit_stable.run.folder import checkpoint_path


def nested(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def test_changes_are_the_leaves_that_differ_in_the_order_of_the_new_recipe():
    old = {"model": {"gpt": {"n_layer": 2, "bias": False}}, "data": {"validation": None, "gone": 1}, "same": [1, 2]}
    new = {"data": {"validation": {"a": "x"}}, "model": {"gpt": {"n_layer": 3, "bias": False}}, "same": [1, 2]}
    assert changes(old, new) == ["data.validation.a: unset -> x", "model.gpt.n_layer: 2 -> 3", "data.gone: 1 -> unset"]


def test_a_feature_that_comes_or_goes_is_one_line_and_a_changed_one_a_line_per_option():
    clip = {"class_path": "lit_stable.callbacks.GradClip", "init_args": {"max_norm": 1.0, "schedule": None}}
    on, off = nested("stability.grad_clip", clip), nested("stability.grad_clip", None)
    assert changes(off, on) == ["stability.grad_clip: None -> GradClip(max_norm=1.0)"]
    assert changes(on, off) == ["stability.grad_clip: GradClip(max_norm=1.0) -> None"]
    other = copy.deepcopy(on)
    other["stability"]["grad_clip"]["init_args"]["max_norm"] = 0.3
    assert changes(on, other) == ["stability.grad_clip.init_args.max_norm: 1.0 -> 0.3"]


@pytest.mark.parametrize("key", ["run.name", "checkpoints.every_steps", "trainer.logger", "resume", "ckpt_path"])
def test_where_a_run_lives_is_no_change(key):
    assert remarkable_changes(nested(key, 1), nested(key, 2)) == []


@pytest.mark.parametrize(("policy", "counts"), [("error", False), ("checkpoint", False), ("override", True)])
def test_the_schedule_changes_only_where_the_recipe_overrides_it(policy, counts):
    old, new = ({"model": {"schedule": {"peak": peak, "on_conflict": policy}}} for peak in (1.0, 2.0))
    assert changes(old, new) == (["model.schedule.peak: 1.0 -> 2.0"] if counts else [])


@pytest.mark.parametrize(
    ("key", "another"),
    [
        ("trainer.max_steps", False),
        ("trainer.devices", False),
        ("trainer.precision", True),
        ("data.num_workers", False),
        ("data.seed_data", True),
        ("data.skip_steps", True),
        ("model.optimizer.weight_decay", True),
        ("stability.grad_clip", True),
        ("validate_every", False),
        ("run.root", False),
    ],
)
def test_what_is_computed_makes_another_run_and_what_is_written_does_not(tmp_path, key, another):
    (tmp_path / "recipe-01.yaml").write_text(yaml.safe_dump(nested(key, 1)))
    assert is_another_run(tmp_path, nested(key, 2), {}) is another
    assert is_another_run(tmp_path, nested(key, 1), {}) is False


def test_other_data_under_the_same_recipe_make_another_run_and_other_validation_does_not(tmp_path):
    stored = {"data.sources.a": "5 tokens", "data.validation.a": "1 tokens"}
    (tmp_path / "environment-01.yaml").write_text(yaml.safe_dump({"torch": "2.6", "data": stored}))
    assert is_another_run(tmp_path, {}, stored) is False
    assert is_another_run(tmp_path, {}, {**stored, "data.sources.a": "6 tokens"}) is True
    assert is_another_run(tmp_path, {}, {**stored, "data.validation.a": "2 tokens"}) is False


def test_the_newest_recipe_of_a_folder_is_what_counts(tmp_path):
    for number in (1, 2):
        (tmp_path / f"recipe-0{number}.yaml").write_text(yaml.safe_dump({"x": number}))
    assert is_another_run(tmp_path, {"x": 2}, {}) is False
    assert is_another_run(tmp_path, {"x": 1}, {}) is True


def test_sessions_count_by_their_number_and_not_by_the_order_of_letters(tmp_path):
    for number in (99, 100):
        (tmp_path / f"recipe-{number}.yaml").write_text(yaml.safe_dump({"x": number}))
    assert [path.name for path in stored_recipes(tmp_path)] == ["recipe-99.yaml", "recipe-100.yaml"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("}{", "expected the node content"),
        ("- 1", "it holds a list where a mapping belongs"),
        ("run: 1", "it needs run, step and differences"),
        ("run: x\nstep: y\ndifferences: []", "it needs run, step and differences"),
    ],
)
def test_a_parent_that_cannot_be_read_is_a_sentence(tmp_path, text, why):
    (tmp_path / "parent.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"parent\.yaml: cannot be read \(.*{why}.*\); put it back as it was\."):
        read_parent(tmp_path)


def test_a_parent_is_found_again_after_both_folders_have_moved(tmp_path):
    parent, child = tmp_path / "runs" / "v2.0" / "0001", tmp_path / "runs" / "v2.1" / "0001"
    child.mkdir(parents=True)
    parent.mkdir(parents=True)
    (parent / "recipe-01.yaml").write_text("")
    write_parent(child, checkpoint_path(parent, 7), 7, ["a: 1 -> 2"])
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert read_parent(tmp_path / "moved" / "v2.1" / "0001") == Parent("../../v2.0/0001", 7, ["a: 1 -> 2"])


def test_a_checkpoint_that_lies_in_no_run_folder_is_named_itself(tmp_path):
    assert run_folder_of(tmp_path / "checkpoints" / "x.ckpt") is None
    write_parent(tmp_path, tmp_path / "x.ckpt", 3, [])
    assert read_parent(tmp_path) == Parent("x.ckpt", 3, [])
    assert read_parent(Path("nowhere")) is None


def test_the_docs_list_what_may_change_while_a_run_stays_the_same_one():
    page = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
    told = page.split("only while nothing but these has changed:")[1].split("`lit-stable runs DIR`")[0]
    keys = re.findall(r"`([a-z_.*]+)`", told)
    assert sorted(keys) == sorted(f"{key}*" if key.endswith("_") else key.rstrip(".") for key in _THE_SAME_RUN)
