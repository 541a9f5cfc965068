"""A command waits for what it needs, and its help for nothing: each is run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_stable.cli.main import _ALONE

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "lightning", "pytorch_lightning", "torchmetrics", "transformers"}
CODE = f"""
import sys
from lit_stable.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(code, *sorted({HEAVY} & set(sys.modules)))
"""


def code_and_heavy_modules(folder: Path, *words: str) -> list[str]:
    """The exit code of a command, and what it has imported of what takes seconds."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=folder,
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stdout.splitlines()[-1].split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that has a checkpoint, a branch of it, and a text."""
    folder = tmp_path_factory.mktemp("light")
    for number in ("0001", "0002"):
        run = folder / "runs" / "a" / number
        (run / "checkpoints").mkdir(parents=True)
        (run / "recipe-01.yaml").touch()
        (run / "checkpoints" / "step-00000003.ckpt").touch()
    (run / "parent.yaml").write_text("{run: ../0001, step: 3, differences: []}")
    (folder / "text.txt").write_text("one two three")
    return folder


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("1", "ctl runs/a/0001 save"),
        ("1", "ctl runs/a/0002 lr*=0.5 --wait 0.1"),
        ("2", "ctl runs/a/0001 halt"),
        ("2", "ctl runs/a/0001 lr*=0"),
        ("2", "ctl nowhere stop"),
        ("0", "runs"),
        ("2", "runs nowhere"),
        ("0", "recipes"),
        ("2", "recipes no_such_recipe"),
        ("0", "prepare text.txt --out tokens --tokenizer bytes --validation_fraction 0"),
        ("2", "prepare nowhere.txt --out other --tokenizer bytes"),
        ("2", "generate a@9 --prompt one"),
        ("2", "check-devices --rounds 1"),
    ],
)
def test_these_are_answered_without_torch(folder: Path, code: str, line: str) -> None:
    assert code_and_heavy_modules(folder, *line.split()) == [code]


@pytest.mark.parametrize("name", _ALONE)
def test_the_options_of_a_command_without_a_recipe_are_listed_without_torch(folder: Path, name: str) -> None:
    assert code_and_heavy_modules(folder, name, "--help") == ["0"]
