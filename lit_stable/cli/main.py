"""`lit-stable fit|validate|test|check`: a recipe becomes a module, data, callbacks and a Trainer."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_stable.callbacks import (
    AccumulationWindows,
    BatchSizeWarmup,
    Detectors,
    Events,
    GracefulStop,
    GradNorm,
    KillFileExists,
    Progress,
    Recovery,
    RunControl,
    SafeCheckpoints,
    StepSeed,
    ValidateEverySteps,
    fit_with_recovery,
)
from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.fit_with_recovery import pending_target
from lit_stable.callbacks.recovery_exit import RESTART, STOPPED, RecoveryStopped, Rewind
from lit_stable.callbacks.run_control import STOPPED as ORDERED
from lit_stable.cli.average import run_average
from lit_stable.cli.caption import run_caption
from lit_stable.cli.check import check
from lit_stable.cli.check_devices import run_check_devices
from lit_stable.cli.command import Command
from lit_stable.cli.construction import construction_problems
from lit_stable.cli.ctl import run_ctl
from lit_stable.cli.diagnose import run_diagnose
from lit_stable.cli.dump_batch import run_dump_batch
from lit_stable.cli.errors import RunFailed, RunStopped, UserError, is_for_the_user, sentence
from lit_stable.cli.every_problem import every_problem
from lit_stable.cli.exchange import run_export, run_import
from lit_stable.cli.features import active_features, add_feature_arguments, adopt_data, refuse_twins
from lit_stable.cli.generate import run_generate
from lit_stable.cli.inspect_checkpoint import run_inspect
from lit_stable.cli.places import located
from lit_stable.cli.prepare import run_prepare
from lit_stable.cli.published import Published
from lit_stable.cli.recipe import expand_arguments
from lit_stable.cli.replay import run_replay
from lit_stable.cli.runs import run_runs
from lit_stable.cli.systems import system_asked_for
from lit_stable.cli.trace import Row, trace, write_trace
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.console import quiet_lightning, say
from lit_stable.run.folder import checkpoint_step, checkpoints, find_checkpoint, newest_run_with_checkpoint
from lit_stable.run.loss_scale_watch import LossScaleWatch
from lit_stable.run.masked_share import MaskedShare
from lit_stable.run.report import Report
from lit_stable.run.session import RunOptions, Session
from lit_stable.run.surgery import Surgery, SurgeryOptions
from lit_stable.strategies import fsdp1, fsdp2
from lit_stable.strategies.launcher import launched_devices, recipe_devices
from lit_stable.strategies.loss_scale import LossScale
from lit_stable.strategies.mesh import MeshOptions
from lit_stable.strategies.selection import select
from lit_stable.systems import DEFAULT, SystemName, system

FAILED, USAGE_ERROR = 1, 2
_SIGNALLED = 128
_AT_A_GLANCE = 1_000_000  # steps of a run whose trace takes seconds

#: Subcommands that read no recipe; what they return is the exit code, None as 0.
_ALONE: dict[str, Callable[[Sequence[str]], int | None]] = {
    "prepare": run_prepare,
    "diagnose": run_diagnose,
    "inspect": run_inspect,
    "dump-batch": run_dump_batch,
    "replay": run_replay,
    "ctl": run_ctl,
    "check-devices": run_check_devices,
    "runs": run_runs,
    "export": run_export,
    "import": run_import,
    "generate": run_generate,
    "average": run_average,
    "caption": run_caption,
}

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,  # the data are endless; a run ends at max_steps
    "check_val_every_n_epoch": None,
    "use_distributed_sampler": False,  # the stream shards itself
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 10,
}


class LitStableCLI(LightningCLI):
    """LightningCLI with the project's defaults; the recipe is the truth, never the checkpoint."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._stop = GracefulStop()
        self._recovery: Recovery | None = None
        self._resumed: Path | None = None
        self._checkpoint: Path | None = None
        chosen = system(system_asked_for(command.layers, command.typed))
        super().__init__(
            chosen.module,
            chosen.data,
            save_config_callback=None,  # the session stores the recipe, and never refuses a second one
            seed_everything_default=False,  # every random number is a function of a seed and a position
            trainer_defaults=TRAINER_DEFAULTS,
            parser_kwargs={"exit_on_error": False, self._fit_like: {"exit_on_error": False}},
            args=[self._fit_like, *command.argv],
            auto_configure_optimizers=False,
        )

    @property
    def _fit_like(self) -> str:
        return "fit" if self.command.name == "check" else self.command.name

    # -- parsing -----------------------------------------------------------------------------------------------------

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """One parser only, for the command at hand: each costs a good part of a second."""
        return {self._fit_like: {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        kinds = "What is trained. gpt: a language model; vlm: one that learns to see."
        parser.add_argument("--system", type=SystemName, default=DEFAULT, help=kinds)
        parser.add_class_arguments(RunOptions, "run")
        parser.add_class_arguments(Checkpoints, "checkpoints", instantiate=True)
        parser.add_class_arguments(Published, "published", instantiate=True)
        parser.add_class_arguments(RunControl, "control", instantiate=True, skip={"folder"})
        parser.add_class_arguments(MeshOptions, "mesh", instantiate=True)
        parser.add_class_arguments(LossScale, "loss_scale", instantiate=True)
        parser.add_class_arguments(SurgeryOptions, "surgery", instantiate=True)
        parser.add_argument("--validate_every", type=int, default=500, help="Optimizer steps between validations.")
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
        if self.command.name == "check":
            devices = "Devices to plan for; null: those that the recipe names, else 1."
            parser.add_argument("--devices", type=int | None, default=None, help=devices)
            parser.add_argument(
                "--trace", type=Path | None, default=None, help="CSV to write the schedules of every iteration to."
            )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand != "fit":
            parser.set_defaults({"verbose": False})  # Lightning's own table; the report prints the losses
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        own = self._subcommand_parsers[self._fit_like]
        problems = every_problem(self.command.argv, self.command.layers, own, construction_problems)
        if problems:
            raise UserError("\n".join(problems))
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise UserError(str(error)) from error

    def _add_instantiators(self) -> None:
        """Nothing: they would store arguments for `load_from_checkpoint`; the session stores the recipe."""

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would replace explicit values by the checkpoint's here, without a word."""

    # -- building ----------------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        text = self._parser(self._fit_like).dump(self.config[self._fit_like], skip_unset=False)
        recipe: dict[str, Any] = yaml.safe_load(text)
        return recipe

    def before_instantiate_classes(self) -> None:
        self._refuse(construction_problems(self.config[self._fit_like]))

    def _refuse(self, problems: Sequence[str]) -> None:
        """End with these problems, if there are any, each with the line of the recipe that it comes from."""
        if problems:
            raise UserError("\n".join(located(problems, self.command.layers, self.command.argv)))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer_config = dict(self._get(self.config_init, "trainer"))
        if launched := launched_devices():
            trainer_config.update(launched)
        user_callbacks = trainer_config.pop("callbacks") or []
        user_callbacks = user_callbacks if isinstance(user_callbacks, list) else [user_callbacks]
        features = active_features(self._get(self.config_init, "stability"))
        refuse_twins(user_callbacks, features)
        adopt_data(features, self.datamodule)
        self.features = features
        own_loggers = trainer_config["logger"] is None
        trainer_config["logger"] = False if own_loggers else trainer_config["logger"]
        given = [*features.values(), *user_callbacks]
        callbacks = [*self._own_callbacks(own_loggers, given), *given]
        self.model.runs = Path(self._get(self.config_init, "run").root)
        self.model.is_continued = self._checkpoint is not None and not self._begins_with_weights
        self.trainer_options = trainer_config
        self.mesh, loss_scale = (self._get(self.config_init, name) for name in ("mesh", "loss_scale"))
        if self.command.name == "check":  # the recipe's devices need not be here
            return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=True)
        try:
            return Trainer(**{**select(trainer_config, self.mesh, loss_scale), "callbacks": callbacks})
        except (ValueError, RuntimeError) as error:  # Lightning's and the strategies' refusals of options
            raise UserError(str(error)) from error

    def _own_callbacks(self, own_loggers: bool, given: list[Callback]) -> list[Callback]:
        options: RunOptions = self._get(self.config_init, "run")
        self._recovery = next((c for c in given if isinstance(c, Recovery)), None)
        root, name = Path(options.root), options.name or self.command.default_name
        self._find_checkpoint(root, name)
        self._report = Report(self.command.to_go_on, self.command.notes)
        recipe = self.recipe
        recipe["run"]["name"] = name  # so that the stored recipe, run by its path, still has this name
        alone = self._begins_with_weights
        session = Session(root, name, recipe, self._checkpoint, self._resumed, own_loggers, weights_alone=alone)
        self.model.initial_weights = self._checkpoint if alone else None
        return [
            session,
            *self._spine(given),
            self._get(self.config_init, "control"),
            self._stop,
            self._report,
            self._get(self.config_init, "checkpoints"),
        ]

    def _spine(self, given: list[Callback]) -> list[Callback]:
        """What every fit of a recipe computes with, wherever it is written down."""
        data = self.datamodule
        windows = AccumulationWindows(data.global_batch, data.micro_batch)
        return [
            Progress(),
            Events(),
            StepSeed(data.seed_data),
            # A batch-size warm-up opens the windows itself.
            *([] if any(isinstance(c, BatchSizeWarmup) for c in given) else [windows]),
            # The ladder climbs on what detectors find.
            *([Detectors()] if self._recovery and not any(isinstance(c, Detectors) for c in given) else []),
            GradNorm(),
            *([] if data.mask_repeats is None else [MaskedShare()]),
            ValidateEverySteps(self._get(self.config, "validate_every")),
            SafeCheckpoints(),
            self._surgery(),
            LossScaleWatch(),
        ]

    def _surgery(self) -> Surgery:
        options: SurgeryOptions = self._get(self.config_init, "surgery")
        if options.insert and self._checkpoint is None and self.command.name == "fit":
            raise ValueError(
                f"surgery.insert={options.insert}: is done on a checkpoint; give --ckpt_path, or leave it away: a new"
                " run has the norm from the start."
            )
        if self._begins_with_weights:
            self.model.inserted = tuple(options.insert)
        return Surgery(options)

    @property
    def _begins_with_weights(self) -> bool:
        return self._fit_like == "fit" and self._get(self.config, "ckpt_part") == "weights"

    def _find_checkpoint(self, root: Path, name: str) -> None:
        ckpt_path = self._get(self.config, "ckpt_path")
        if self._begins_with_weights and ckpt_path is None:
            raise ValueError(
                "ckpt_part=weights: says how a run begins, not how it goes on; give --ckpt_path, or leave it away."
            )
        if self._get(self.config, "resume") == "auto":
            if ckpt_path is not None:
                raise ValueError(f"ckpt_path={ckpt_path} and resume=auto: each says where to go on; give one of them.")
            self._resumed = newest_run_with_checkpoint(root, name)
            if self._resumed:
                pending = pending_target(self._resumed) if self._recovery else None
                self._checkpoint = pending or checkpoints(self._resumed)[-1]
            found = f"going on with {self._checkpoint}" if self._checkpoint else f"no run of {name!r} yet, starting one"
            say(f"resume=auto: {found}")
        elif ckpt_path is None and self.command.name in ("validate", "test"):
            raise ValueError(
                f"ckpt_path=null: `{self.command.name}` needs a checkpoint; give --ckpt_path PATH or last."
            )
        elif ckpt_path is not None:
            self._checkpoint = find_checkpoint(str(ckpt_path), root, name)

    # -- running -----------------------------------------------------------------------------------------------------

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        whole = self._checkpoint and not self._begins_with_weights
        kwargs["ckpt_path"] = str(self._checkpoint) if whole else None
        return kwargs

    def _run_subcommand(self, subcommand: str) -> None:
        if self.command.name == "check":
            devices = self._get(self.config, "devices") or recipe_devices(self.trainer_options)
            try:
                page = self._page(devices)
            except MisconfigurationException as error:
                self._refuse(str(error).splitlines())
                raise
            print("\n".join([*self.command.notes, page]))
            return
        try:
            self._run_or_recover(subcommand)
        except RecoveryStopped as error:
            raise RunStopped(str(error)) from error
        except (MisconfigurationException, ValueError) as error:
            if not is_for_the_user(error) or isinstance(error, KillFileExists):
                raise
            # A checkpoint that cannot be read or written is no fault of the recipe.
            failed = self._report.started or isinstance(error, CheckpointError)
            raise (RunFailed if failed else UserError)(sentence(error)) from error
        if subcommand == "fit" and self._checkpoint and not self._report.started:
            steps = Progress.of(self.trainer).steps
            say(f"nothing to do: {self._checkpoint} is at step {steps}; set --trainer.max_steps above it to go on.")

    def _page(self, devices: int) -> str:
        """What `check` prints; with `--trace` the file is written too."""
        path, steps = self._get(self.config, "trace"), self.trainer_options["max_steps"]
        rows = list(self._rows()) if path is not None or steps <= _AT_A_GLANCE else []
        page = check(
            *(self.model, self.datamodule, self.trainer_options, self.features, devices, self.mesh),
            published=self._get(self.config_init, "published"),
            rows=rows,
            checkpoints=self._get(self.config_init, "checkpoints"),
        )
        if path is None:
            return page
        if not rows:
            raise UserError(f"trainer.max_steps={steps}: a trace needs the end of the run; set it.")
        try:
            write_trace(path, rows)
        except OSError as error:
            raise UserError(f"trace={path}: cannot be written: {error.strerror}.") from error
        return f"{page}\n\ntrace: {steps:,} iterations in {path}"

    def _rows(self) -> Iterator[Row]:
        data, module = self.datamodule, self.model
        goes_on = not self._begins_with_weights
        resumed_at = (checkpoint_step(self._checkpoint) or 0) if self._checkpoint and goes_on else 0
        return trace(
            module.schedule,
            module.optimizer_options.weight_decay,
            data.global_batch,
            data.sequence_length,
            self.features.values(),
            self.trainer_options["max_steps"],
            resumed_at,
        )

    def _run_or_recover(self, subcommand: str) -> None:
        if subcommand == "fit" and self._recovery:
            options = self._prepare_subcommand_kwargs(subcommand)
            fit_with_recovery(self.trainer, options.pop("model"), **options)
        else:
            super()._run_subcommand(subcommand)

    @property
    def exit_code(self) -> int:
        """0, 128 + the signal that stopped the run, or that it was stopped by an order."""
        if self._stop.signal:
            return _SIGNALLED + self._stop.signal
        return ORDERED if self._get(self.config_init, "control").stopped else 0


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the process's exit code."""
    name, rest = argv[0], list(argv[1:])
    quiet_lightning()
    fsdp1.register_strategies()
    fsdp2.register_strategies()
    try:
        if name in _ALONE:
            return _ALONE[name](rest) or 0
        return LitStableCLI(Command(name, rest, *expand_arguments(rest))).exit_code
    except (RunFailed, RunStopped, Rewind, KillFileExists) as error:
        print(f"lit-stable {name}: {error}", file=sys.stderr, flush=True)
        return {RunFailed: FAILED, RunStopped: STOPPED, Rewind: RESTART, KillFileExists: ORDERED}[type(error)]
    except (UserError, MisconfigurationException, ValueError) as error:
        if not (isinstance(error, UserError) or is_for_the_user(error)):
            raise
        print(f"lit-stable {name}: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
