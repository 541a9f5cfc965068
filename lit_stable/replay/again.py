"""Fit the recipe of a run again, from a checkpoint up to a step, without leaving a trace in the run's folder."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI

from lit_stable.callbacks import RunControl
from lit_stable.cli.beginning import Beginning
from lit_stable.cli.command import Command
from lit_stable.cli.lightning_cli import LitStableCLI
from lit_stable.cli.recipe import expand_arguments
from lit_stable.replay.start import Start
from lit_stable.replay.step_watch import NORM, Replayed, StepWatch
from lit_stable.replay.way import Way

#: Features that speak to the world or keep records of their own.
_SILENT = ("alarm", "black_box", "sample_text")


class ReplayCLI(LitStableCLI):
    """The command line with a watch in place of session, report, and saving.

    Args:
        command: What a fit would be given.
        run: The run's folder, whose orders hold.
        checkpoint: Where to begin; None: at step 0.
        watch: Records.
        way: Says how far it is.
    """

    def __init__(self, command: Command, run: Path, checkpoint: Path | None, watch: StepWatch, way: Way) -> None:
        self._run_folder, self._from, self._watch, self._way = run, checkpoint, watch, way
        super().__init__(command)

    def _begin(self, given: list[Callback]) -> None:
        self._begins = Beginning(self._from)

    def _own_callbacks(self, own_loggers: bool, of_spine: list[Callback]) -> list[Callback]:
        control: RunControl = self._get(self.config_init, "control")
        control.folder, control.is_replay = self._run_folder, True
        return [*of_spine, control, self._watch, self._way]

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            LightningCLI._run_subcommand(self, subcommand)
        except Exception as error:
            if self._watch.step not in self._watch.found.values[NORM]:
                raise
            # What ended the run at this step ends its replay as well.
            self._watch.found.error = f"{type(error).__name__}: {error}"


def replay_once(start: Start, step: int, name: str, words: Sequence[str] = (), compiles: bool = True) -> Replayed:
    """Take the steps from a checkpoint to ``step`` again; all ranks of a launch call it.

    Args:
        start: Where to begin, in which run, and by which stored recipe.
        step: Optimizer step, counted from 1.
        name: Of this replay, on the screen.
        words: Options on top of the recipe, as on the command line.
        compiles: Whether the network is compiled where it was in the run; no module inside is looked at then.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Report and session are left out on purpose.
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided.*")
        options = [
            "--config",
            str(start.recipe),
            "--ckpt_path",
            "null",
            "--resume",
            "null",
            "--trainer.max_steps",
            str(step),
        ]
        options += ["--trainer.limit_val_batches", "0", "--trainer.logger", "false", "--trainer.log_every_n_steps", "1"]
        options += ["--trainer.default_root_dir", folder, *([] if compiles else ["--model.compile", "off"])]
        options += [word for name in _SILENT for word in (f"--stability.{name}", "null")]
        argv: list[Any] = [*options, *words]
        watch, way = StepWatch(step), Way(name, start.origin, step)
        ReplayCLI(Command("fit", argv, *expand_arguments(argv)), start.folder, start.checkpoint, watch, way)
        return watch.gather()
