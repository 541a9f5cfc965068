"""What a recipe may hold beside module, data and trainer, and what a trainer is told if nobody says more."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.cli import LightningArgumentParser

from lit_stable.callbacks import GracefulStop, RunControl
from lit_stable.callbacks.cadence import Every
from lit_stable.cli.features import add_feature_arguments
from lit_stable.cli.published import Published
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.session import RunOptions
from lit_stable.run.surgery import SurgeryOptions
from lit_stable.strategies.loss_scale import LossScale
from lit_stable.strategies.mesh import MeshOptions
from lit_stable.systems import DEFAULT, SystemName

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,  # the data are endless; a run ends at max_steps
    "check_val_every_n_epoch": None,
    "use_distributed_sampler": False,  # the stream shards itself
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 10,
}


def add_recipe_arguments(parser: LightningArgumentParser, command: str) -> None:
    """Declare the options of a command, each a key of a recipe."""
    kinds = "What is trained. gpt: a language model; vlm: one that learns to see."
    parser.add_argument("--system", type=SystemName, default=DEFAULT, help=kinds)
    parser.add_class_arguments(RunOptions, "run")
    parser.add_class_arguments(Checkpoints, "checkpoints", instantiate=True)
    parser.add_class_arguments(Published, "published", instantiate=True)
    parser.add_class_arguments(RunControl, "control", instantiate=True, skip={"folder"})
    parser.add_class_arguments(GracefulStop, "graceful_stop", instantiate=True, skip={"dirpath"})
    parser.add_class_arguments(MeshOptions, "mesh", instantiate=True)
    parser.add_class_arguments(LossScale, "loss_scale", instantiate=True)
    parser.add_class_arguments(SurgeryOptions, "surgery", instantiate=True)
    every = "Optimizer steps between validations; with a unit samples or tokens, as 2M tokens."
    parser.add_argument("--validate_every", type=Every, default=500, help=every)
    parser.add_argument(
        "--resume",
        type=Literal["auto"] | None,
        default=None,
        help="auto: go on with the newest run of this name, in its folder, or start one if there is none.",
    )
    parser.add_argument(
        "--ckpt_part",
        type=Literal["all", "weights"],
        default="all",
        help="What a fit takes of ckpt_path. weights: nothing else, a new run at step 0 with a new optimizer.",
    )
    add_feature_arguments(parser)
    if command == "check":
        devices = "Devices to plan for; null: those that the recipe names, else 1."
        parser.add_argument("--devices", type=int | None, default=None, help=devices)
        parser.add_argument(
            "--trace", type=Path | None, default=None, help="CSV to write the schedules of every iteration to."
        )
