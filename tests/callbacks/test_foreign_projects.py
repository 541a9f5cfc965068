"""The callbacks in other people's projects: copied under another name, under ``import pytorch_lightning``, and gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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

WITHOUT = "import sys\nsys.modules[{!r}] = None\n"


def run_project(folder: Path, namespace: str, package: str, path: Path, first: str = "") -> str:
    code = first + PROJECT.replace("NAMESPACE", namespace).replace("PACKAGE", package)
    (folder / "project.py").write_text(code)
    (folder / "project.yaml").write_text(YAML.replace("PACKAGE", package))
    (folder / "cases.json").write_text(json.dumps({path_of(name): case(name) for name in ACTING}))
    shutil.copy(acting_project.__file__, folder)
    (folder / "runs").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "project.py", "runs"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("RAN"))


def path_of(name: str) -> str:
    """Of a callback in any copy of the package."""
    return f"{CLASSES[name].__module__.removeprefix('lit_stable.callbacks.')}.{name}"


def case(name: str) -> dict[str, Any]:
    """How the contract has a callback act, as plain values."""
    entry = ENTRIES[name]
    beside = {path_of(other): arguments for other, arguments in entry.beside.items()}
    return {"acts": entry.acts, "beside": beside, "width": entry.width, "logs": takes_action(name)}


def copy_of_the_callbacks(folder: Path) -> Path:
    """Copied as a user would, under another name."""
    shutil.copytree(ROOT / "callbacks", folder / "stability", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_a_copy_of_the_folder_under_another_name_works_without_this_package(tmp_path: Path) -> None:
    folder = copy_of_the_callbacks(tmp_path)
    said = run_project(tmp_path, "lightning.pytorch", "stability", folder, first=WITHOUT.format("lit_stable"))
    assert said == f"RAN {len(ACTING)} lightning"


def test_they_work_in_a_trainer_of_the_other_namespace(tmp_path: Path) -> None:
    said = run_project(tmp_path, "pytorch_lightning", "lit_stable.callbacks", ROOT)
    assert said == f"RAN {len(ACTING)} lightning lit_stable pytorch_lightning"


def test_they_work_where_only_the_stand_alone_packages_are_installed(tmp_path: Path) -> None:
    folder = copy_of_the_callbacks(tmp_path)
    said = run_project(tmp_path, "pytorch_lightning", "stability", folder, first=WITHOUT.format("lightning"))
    assert said == f"RAN {len(ACTING)} pytorch_lightning"


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


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_theirs_goes_on_where_this_package_cannot_be_imported(tmp_path: Path) -> None:
    paths = [tmp_path / "whole.ckpt", tmp_path / "sharded.ckpt"]
    straight = [checkpoint_with_them(sharded, path) for sharded, path in zip((False, True), paths, strict=True)]
    assert paths[0].is_file()
    assert paths[1].is_dir()
    command = [sys.executable, bare_project.__file__, str(tmp_path / "results.json"), *map(str, paths)]
    launched_as = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")  # of the sharded run here
    env = {name: value for name, value in os.environ.items() if name not in launched_as}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    for trainer, result in zip(straight, results, strict=True):
        assert result == {"steps": STEPS, "weights": bare_project.weights(trainer)}
