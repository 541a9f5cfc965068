"""What a run ran on, and what has changed of it."""

from __future__ import annotations

import subprocess
from importlib.metadata import version

import pytest
import torch

from lit_stable.run.fingerprint import environment_changes, fingerprint, recipe_hash


def test_it_names_versions_hardware_commits_settings_and_every_package(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    found = fingerprint({"a": 1}, ranks=3)
    assert found["recipe"] == recipe_hash({"a": 1})
    assert found["torch"].startswith(torch.__version__)
    assert (found["ranks"], found["packages"]["lightning"]) == (3, version("lightning"))
    assert found["settings"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "SECRET_TOKEN" not in found["settings"]
    assert found["CPU"]


def test_the_commit_of_the_project_is_that_of_the_repository_one_stands_in(tmp_path, monkeypatch):
    assert fingerprint({}, 1)["project"] == "no repository"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    monkeypatch.chdir(tmp_path / "sub")
    clean = fingerprint({}, 1)["project"]
    assert head.startswith(clean)
    (tmp_path / "file").write_text("2")
    assert fingerprint({}, 1)["project"] == f"{clean}-dirty"


def test_the_hash_of_a_recipe_knows_its_values_and_not_its_place():
    first = recipe_hash({"model": {"a": 1, "b": 2}, "run": {"name": "x"}})
    assert first == recipe_hash({"run": {"name": "y"}, "model": {"b": 2, "a": 1}})
    assert first != recipe_hash({"model": {"a": 1, "b": 3}})
    assert len(first) == 16


def test_changes_are_named_one_by_one_but_for_the_recipe():
    old = {"recipe": "a", "torch": "2.6", "GPUs": "V100", "packages": {"numpy": "1", "gone": "3"}}
    new = {"recipe": "b", "torch": "2.6", "GPUs": "A100", "packages": {"numpy": "2"}, "NCCL": "2.2"}
    assert environment_changes(old, new) == [
        "GPUs: V100 -> A100",
        "packages.numpy: 1 -> 2",
        "NCCL: none -> 2.2",
        "packages.gone: 3 -> none",
    ]
    assert environment_changes(old, old) == []


@pytest.mark.parametrize(("count", "shown"), [(20, 20), (25, 21)])
def test_of_very_many_changes_the_first_are_shown(count, shown):
    lines = environment_changes({"packages": {}}, {"packages": {f"p{n}": "1" for n in range(count)}})
    assert len(lines) == shown
    assert (lines[-1] == "and 5 more; compare the files environment-*.yaml") == (count > 20)
