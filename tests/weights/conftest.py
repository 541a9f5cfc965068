"""One tiny run, with a checkpoint of every second step."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_recipe import command, write_recipe


@pytest.fixture(scope="package")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    return write_recipe(folder, checkpoints={"every_steps": 2, "first_step": 2, "keep_last": 5})


@pytest.fixture(scope="package")
def run(recipe: Path) -> Path:
    done = command("fit", "--config", recipe)
    assert done.code == 0, done.err
    return recipe.parent / "runs" / "tiny" / "0001"
