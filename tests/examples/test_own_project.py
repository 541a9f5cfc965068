"""Every project under ``examples/own_project`` runs by its own command; its callbacks skip what is broken in it."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Script

FOLDER = Path(__file__).parents[2] / "examples" / "own_project"
CLIPPED = {"stability/clip_frac", "stability/clip_level", "stability/grad_norm"}
SKIPPED = {"stability/spike_score", "stability/spikes", "stability/overflows", "progress/skipped", "progress/samples"}


class Started:
    """``python SCRIPT WORDS`` in an interpreter of its own, as a ``Script`` is in a fork of one."""

    def __init__(self, script: Path, words: list[str], environ: dict[str, str], folder: Path) -> None:
        out = subprocess.PIPE
        command = [sys.executable, str(script), *words]
        self._process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT)

    def said(self) -> str:
        output = self._process.communicate(timeout=600)[0].decode()
        assert self._process.returncode == 0, output[-4000:]
        return output

    def kill(self) -> None:
        self._process.kill()


class Run:
    """A documented command, under way in a folder of its own.

    One of the other namespace has an interpreter of its own: forks have Lightning's and our callbacks imported before.
    """

    def __init__(self, command: str, folder: Path) -> None:
        script, *arguments = command.split()
        assert f"python {command}" in (FOLDER / script).read_text(), "the file's first lines say how it is run"
        arguments = [str(FOLDER / a) if a.endswith(".yaml") else a for a in arguments]
        path = os.pathsep.join([str(FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.folder = folder
        start = Started if script.startswith("pytorch_lightning") else Script
        self.process = start(FOLDER / script, arguments, {**os.environ, "PYTHONPATH": path}, folder)

    def said(self) -> str:
        """What it printed, when it is through."""
        return self.process.said()

    def logged(self, folder: str) -> dict[str, list[float]]:
        """Every metric's values, in order of the steps."""
        columns: dict[str, list[float]] = {}
        with (self.folder / folder / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value:
                        columns.setdefault(name, []).append(float(value))
        return columns


BARE = "plain.py --bare --max_steps 12 --out runs/bare"
COMMANDS = {  # each with the package that it needs
    "transformers": "hf_gpt2.py",
    "transformers, cli": "hf_gpt2_cli.py fit --config hf_gpt2.yaml",
    "lightning": "cli.py fit --config cli.yaml",
    "pytorch_lightning": "pytorch_lightning_cli.py fit --config cli.yaml",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """All commands that do not wait for another, at once."""
    started = {name: command for name, command in COMMANDS.items() if find_spec(name.split(",")[0]) is not None}
    under_way = {name: Run(command, tmp_path_factory.mktemp(name)) for name, command in started.items()}
    under_way["bare"] = Run(BARE, tmp_path_factory.mktemp("plain"))
    yield under_way
    for run in under_way.values():
        run.process.kill()


def test_a_plain_project_is_begun_without_them_and_goes_on_with_them(runs: dict[str, Run]) -> None:
    runs["bare"].said()
    assert "stability/grad_norm" not in runs["bare"].logged("runs/bare")

    resumed = Run("plain.py --ckpt_path runs/bare/last.ckpt", runs["bare"].folder)
    said = resumed.said()
    assert "taken as consumed: 192 samples (12 batches of at most 16 on 1 rank), 6,336 tokens" in said
    assert "step 33: skipped: gradient norm nan is not finite" in said
    found = resumed.logged("runs/plain")
    assert found.keys() >= CLIPPED | SKIPPED | {"stability/lr", "stability/lr_factor", "stability/override_lr"}
    assert found["progress/samples"][0] == 192 + 3 * 16, "counted on from what was inferred, to step 15"
    assert found["progress/skipped"] == [0, 0, 0, 0, 1, 1]
    assert found["stability/lr_factor"][-2:] == [0.5, 0.5]
    assert all(loss < 4 for loss in found["validation_loss"]), "the broken record has cost nothing"


@pytest.mark.parametrize(("name", "folder"), [("transformers", "hf_gpt2"), ("transformers, cli", "hf_gpt2_cli")])
def test_a_hugging_face_model(name: str, folder: str, runs: dict[str, Run]) -> None:
    pytest.importorskip("transformers")
    assert "step 16: skipped: gradient norm nan is not finite" in runs[name].said()
    found = runs[name].logged(f"runs/{folder}")
    frozen, batch = found["stability/frozen_tensors"], found["stability/batch_size"]
    assert found.keys() >= CLIPPED | SKIPPED
    assert (frozen[0], frozen[-1]) == (8, 0)
    assert (batch[0], batch[-1]) == (16, 32)
    assert found["progress/skipped"][-1] == 2
    assert found["loss"][-1] < found["loss"][0]
    rates = found.get("stability/lr_factor", [])
    assert rates == ([] if name == "transformers" else [1] * 4 + [2] * 4), "the YAML has a higher rate from step 20 on"


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_plain_command_line_takes_them_from_yaml_in_either_namespace(package: str, runs: dict[str, Run]) -> None:
    pytest.importorskip(package)
    assert "step 11: skipped: gradient norm nan is not finite" in runs[package].said()
    found = runs[package].logged("runs/cli")
    assert found.keys() >= CLIPPED | SKIPPED | {"progress/micro_batches"}
    assert found["progress/skipped"][-1] == 2
    assert found["progress/micro_batches"][0] == 2
    assert len(found["validation_loss"]) == 2, "after steps 20 and 40"


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("plain")
    for name in ("plain", "characters"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--trainer.callbacks.treshold=1", "treshold"),
        ("--trainer.callbacks.max_skips=0", "max_skips=0"),
        ("--trainer.callbacks.signal=norm", "signal"),
    ],
)
def test_a_wrong_argument_in_a_plain_command_line_is_named(
    argument: str, said: str, project: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning.pytorch.cli import LightningCLI

    arguments = ["fit", "--trainer.accelerator=cpu", "--trainer.callbacks=lit_stable.callbacks.GradSpikeSkip", argument]
    with pytest.raises((SystemExit, Exception)) as refused:
        LightningCLI(project.CharacterModel, project.CharacterData, args=arguments)
    assert said in str(refused.value) + capsys.readouterr().err


def test_a_checkpoint_of_the_project_holds_nothing_but_plain_values(project: Any, tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_steps=2, callbacks=project.stability(), limit_val_batches=0, **options)
    trainer.fit(project.CharacterModel(), project.CharacterData())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    states = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]
    assert states.keys() == {"Progress", "GradSpikeSkip", "GradClip", "LROverride"}
