"""The callbacks in other people's projects: copied under another name, under ``import pytorch_lightning``, and gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acting_project
import bare_project
import pytest
from bare_project import STEPS
from contract_entries import ACTING, CLASSES, ENTRIES, takes_action
from tiny_fit import Watch

from lit_stable.callbacks import (
    AccumulationWindows,
    GracefulStop,
    GradClip,
    GradSpikeSkip,
    LayerNormFreeze,
    LROverride,
    OptimizerReset,
    SafeCheckpoints,
    StepSeed,
)

ROOT = Path(__file__).parents[2]

# Everything a project does with them, in the namespace NAMESPACE and with the package PACKAGE. It saves in the middle
# of a window, is interrupted by a bad gradient and by a signal, resumes bit for bit, and takes them from YAML too. In
# the end each callback that acts is tried alone.
PROJECT = """
import json, math, os, pathlib, signal, sys
import torch
import acting_project
import NAMESPACE as L
from NAMESPACE.cli import LightningCLI
from PACKAGE import (
    AccumulationWindows, EightBitAdam, GracefulStop, GradClip, GradNorm, Progress, SafeCheckpoints, StepSeed,
    ValidateEverySteps,
)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        return loss * math.nan if batch_idx == 3 else loss
    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).mean())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        start = Progress.of(self.trainer).position
        rows = [torch.full((2, 4), float(i)) for i in range(start // 2, 40)]
        return torch.utils.data.DataLoader(rows, batch_size=None)
    def val_dataloader(self):
        return torch.utils.data.DataLoader([torch.ones(1, 4)], batch_size=None)

class Actions(L.Callback):
    def __init__(self, save=None, stop=False):
        self.save, self.stop = save, stop
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.save and batch_idx == 4:
            trainer.save_checkpoint(self.save)
    def on_before_backward(self, trainer, module, loss):
        if self.stop and trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

def fit(resume=None, **actions):
    stop = GracefulStop()
    ours = [stop, ValidateEverySteps(2), SafeCheckpoints(), GradClip(0.5), GradNorm(), StepSeed(1)]
    ours += [AccumulationWindows(4, 2), EightBitAdam(min_8bit_size=1)]
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=6, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        callbacks=[Actions(**actions), *ours], default_root_dir=sys.argv[1], limit_train_batches=30,
    )
    module = Module()
    trainer.fit(module, datamodule=Data(), ckpt_path=resume)
    return module, trainer, stop

middle = os.path.join(sys.argv[1], "middle.ckpt")
straight, trainer, _ = fit(save=middle)
assert Progress.of(trainer).skipped == 1, Progress.of(trainer).skipped
assert (trainer.global_step, Progress.of(trainer).samples) == (6, 24)
assert trainer.optimizers[0].state[straight.net[0].weight]["exp_avg_codes"].dtype == torch.uint8
resumed, again, _ = fit(resume=middle)
assert Progress.of(again).skipped == 1
assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))
stopped, trainer, stop = fit(stop=True)
assert (trainer.global_step, stop.signal) == (5, signal.SIGTERM)
resumed, _, _ = fit(resume=os.path.join(sys.argv[1], "stopped-step=5.ckpt"))
assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))

arguments = ["fit", "--config", "project.yaml"]
cli = LightningCLI(Module, Data, args=arguments, save_config_callback=None, seed_everything_default=False)
assert Progress.of(cli.trainer).skipped == 1
assert "stability/clip_frac" in cli.trainer.callback_metrics
assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), cli.model.parameters()))
cases = json.loads(pathlib.Path("cases.json").read_text())
wrong = acting_project.wrong("NAMESPACE", "PACKAGE", cases, pathlib.Path(sys.argv[1]))
assert not wrong, "".join(f"{name}: {error}" for name, error in wrong.items())

imported = {name.split(".")[0] for name, module in sys.modules.items() if module is not None}
print("RAN", len(cases), *sorted(imported & {"lit_stable", "lightning", "pytorch_lightning"}))
"""

YAML = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 6
  max_epochs: -1
  log_every_n_steps: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  check_val_every_n_epoch: null
  num_sanity_val_steps: 0
  limit_train_batches: 30
  callbacks:
    - class_path: PACKAGE.GradClip
      init_args: {max_norm: 0.5}
    - class_path: PACKAGE.AccumulationWindows
      init_args: {global_batch: 4, micro_batch: 2}
    - class_path: PACKAGE.ValidateEverySteps
      init_args: {every: 2}
    - class_path: PACKAGE.StepSeed
      init_args: {seed: 1}
    - class_path: PACKAGE.EightBitAdam
      init_args: {min_8bit_size: 1}
"""


@dataclass
class Foreign:
    """A project by what it calls Lightning and the callbacks, and the packages that it lacks."""

    namespace: str
    package: str
    lacks: str | None = None

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "runs").mkdir()
        shutil.copy(acting_project.__file__, folder)
        path = ROOT
        if self.package == "stability":  # copied as a user would, under another name
            shutil.copytree(ROOT / "callbacks", folder / "stability", ignore=shutil.ignore_patterns("__pycache__"))
            path = folder
        first = f"import sys\nsys.modules[{self.lacks!r}] = None\n" if self.lacks else ""
        code = first + PROJECT.replace("NAMESPACE", self.namespace).replace("PACKAGE", self.package)
        texts = {
            "words.json": json.dumps([str(path), "runs"]),
            "project.py": code,
            "project.yaml": YAML.replace("PACKAGE", self.package),
            "cases.json": json.dumps({path_of(name): case(name) for name in ACTING}),
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        return folder


PROJECTS = {
    "copied": Foreign("lightning.pytorch", "stability", lacks="lit_stable"),
    "other namespace": Foreign("pytorch_lightning", "lit_stable.callbacks"),
    "stand-alone": Foreign("pytorch_lightning", "stability", lacks="lightning"),
}


def path_of(name: str) -> str:
    """Of a callback in any copy of the package."""
    return f"{CLASSES[name].__module__.removeprefix('lit_stable.callbacks.')}.{name}"


def case(name: str) -> dict[str, Any]:
    """How the contract has a callback act, as plain values."""
    entry = ENTRIES[name]
    beside = {path_of(other): arguments for other, arguments in entry.beside.items()}
    return {"acts": entry.acts, "beside": beside, "width": entry.width, "logs": takes_action(name)}


# -- a checkpoint of theirs, read where they are not -----------------------------------------------------------------


def checkpoint_with_them(sharded: bool, path: Path) -> Any:
    """What a run of STEPS comes to that saves in the middle; the callbacks act, but for clipping, before that alone."""

    def save(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(path)

    stability = [
        *(GradSpikeSkip(), GradClip(1e9), AccumulationWindows(2, 2), SafeCheckpoints(), GracefulStop(), StepSeed(1)),
        *(LayerNormFreeze([{"stop": 2}]), LROverride(factor=1.0), OptimizerReset(start=1, hold_steps=1)),
    ]
    return bare_project.train(sharded, STEPS, [Watch("on_train_batch_end", save), *stability])


def checkpoints(folder: Path) -> list[Path]:
    """Of the whole and of the sharded run."""
    return [folder / "whole.ckpt", folder / "sharded.ckpt"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The last weights of both, which have saved."""
    (folder := tmp_path_factory.getbasetemp() / "foreign" / "bare").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = zip((False, True), checkpoints(folder), strict=True)
        return [bare_project.weights(checkpoint_with_them(sharded, path)) for sharded, path in pairs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, straight: list[Any]) -> dict[str, Path]:
    """Of each project after its run: one interpreter has imported what they have in common, each is a fork of it."""
    around = tmp_path_factory.getbasetemp() / "foreign"
    folders = {name: project.write(around / name.replace(" ", "_")) for name, project in PROJECTS.items()}
    folders["bare"] = around / "bare"
    shutil.copy(bare_project.__file__, folders["bare"] / "project.py")
    words = ["", "results.json", *map(str, checkpoints(folders["bare"]))]
    (folders["bare"] / "words.json").write_text(json.dumps(words))
    launched_as = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")  # of the sharded run here
    elsewhere = {name: value for name, value in os.environ.items() if name not in launched_as}
    script = Path(acting_project.__file__).with_name("foreign_forks.py")
    environ = {**elsewhere, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, *folders.values()], cwd=around, env=environ, check=True, timeout=600)
    return folders


def said(folder: Path) -> str:
    return (folder / "said").read_text() + "ended with " + (folder / "ended").read_text()


def imported(folder: Path) -> str:
    """The packages that a project had imported at its end; all it asserts held."""
    found = re.search(rf"^RAN {len(ACTING)} (.*)\nended with 0$", said(folder), re.MULTILINE)
    assert found, said(folder)[-3000:]
    return found[1]


def test_a_copy_of_the_folder_under_another_name_works_without_this_package(folders: dict[str, Path]) -> None:
    assert imported(folders["copied"]) == "lightning"


def test_they_work_in_a_trainer_of_the_other_namespace(folders: dict[str, Path]) -> None:
    assert imported(folders["other namespace"]) == "lightning lit_stable pytorch_lightning"


def test_they_work_where_only_the_stand_alone_packages_are_installed(folders: dict[str, Path]) -> None:
    assert imported(folders["stand-alone"]) == "pytorch_lightning"


def test_a_checkpoint_of_theirs_goes_on_where_this_package_cannot_be_imported(
    straight: list[Any], folders: dict[str, Path]
) -> None:
    whole, sharded = checkpoints(folders["bare"])
    assert whole.is_file()
    assert sharded.is_dir()
    assert said(folders["bare"]).endswith("ended with 0"), said(folders["bare"])[-3000:]
    results = json.loads((folders["bare"] / "results.json").read_text())
    assert results == [{"steps": STEPS, "weights": weights} for weights in straight]
