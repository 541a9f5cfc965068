"""LightningCLI as this project needs it: a recipe becomes a module, data, callbacks and a Trainer, and is run."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_stable.callbacks import KillFileExists, Progress, Recovery, fit_with_recovery
from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.control_orders import STOPPED as ORDERED
from lit_stable.callbacks.not_written import FULL, caused_by
from lit_stable.callbacks.recovery_exit import RecoveryStopped
from lit_stable.cli.beginning import Beginning, find_beginning
from lit_stable.cli.check import check
from lit_stable.cli.command import Command
from lit_stable.cli.construction import construction_problems
from lit_stable.cli.errors import RunFailed, RunForbidden, RunStopped, UserError, is_for_the_user, sentence
from lit_stable.cli.every_problem import every_problem
from lit_stable.cli.features import active_features, adopt_data, refuse_twins
from lit_stable.cli.places import located
from lit_stable.cli.recipe_arguments import TRAINER_DEFAULTS, add_recipe_arguments
from lit_stable.cli.spine import spine
from lit_stable.cli.systems import system_asked_for
from lit_stable.cli.trace import Trace, trace, write_trace
from lit_stable.run.alike_ranks import compare_strategies
from lit_stable.run.console import quiet_lightning, say
from lit_stable.run.full_disk import full_disk_sentence
from lit_stable.run.report import Report
from lit_stable.run.session import RunOptions, Session
from lit_stable.run.surgery import Surgery, SurgeryOptions
from lit_stable.strategies import fsdp1, fsdp2
from lit_stable.strategies.launcher import launched_devices, recipe_devices, restart_advice
from lit_stable.strategies.roll_call import report_here
from lit_stable.strategies.selection import select
from lit_stable.systems import system

_SIGNALLED = 128
_AT_A_GLANCE = 1_000_000  # steps of a run whose trace takes seconds


class LitStableCLI(LightningCLI):
    """LightningCLI with the project's defaults; the recipe is the truth, never the checkpoint."""

    def __init__(self, command: Command) -> None:
        quiet_lightning()
        fsdp1.register_strategies()
        fsdp2.register_strategies()
        self.command = command
        self._recovery: Recovery | None = None
        self._begins = Beginning()
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
        add_recipe_arguments(parser, self.command.name)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand != "fit":
            parser.set_defaults({"verbose": False})  # Lightning's own table; the report prints the losses
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        own = self._subcommand_parsers[self._fit_like]
        typed = self.command
        found, parsed = every_problem(typed.argv, typed.layers, own, construction_problems, typed.is_whole)
        if problems := [*typed.problems, *found]:
            raise UserError("\n".join(problems))
        if parsed is not None:  # by the subcommand's parser, as the whole one would: that takes as long again
            self.config = Namespace(subcommand=self._fit_like)  # type: ignore[no-untyped-call]
            self.config[self._fit_like] = parsed
            return
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
        parser, parsed = self._parser(self._fit_like), self.config[self._fit_like]
        text = parser.dump(parsed, skip_unset=False, skip_validation=True)  # it was validated as it was parsed
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
        self._begin(given)
        of_spine = self._spine(given)
        self.model.runs = self._get(self.config_init, "run").folder
        self.model.is_continued = self._begins.goes_on_from is not None
        self.trainer_options = trainer_config
        self.mesh, loss_scale = (self._get(self.config_init, name) for name in ("mesh", "loss_scale"))
        if self.command.name == "check":  # the recipe's devices need not be here, and nothing is stored
            return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=True)
        callbacks = [*self._own_callbacks(own_loggers, of_spine), *given]
        try:
            trainer = Trainer(**{**select(trainer_config, self.mesh, loss_scale), "callbacks": callbacks})
        except (ValueError, RuntimeError, TypeError) as error:  # Lightning's and the strategies' refusals of options
            raise UserError(str(error)) from error
        compare_strategies(trainer)
        return trainer

    def _begin(self, given: list[Callback]) -> None:
        """Find out where the run begins."""
        self._recovery = next((c for c in given if isinstance(c, Recovery)), None)
        path, part, resume = (self._get(self.config, key) for key in ("ckpt_path", "ckpt_part", "resume"))
        ladder = self._recovery is not None
        self._begins = find_beginning(self.command.name, path, part, resume, self._place, ladder)

    @property
    def _place(self) -> tuple[Path, str]:
        """Root and name of the run's folder."""
        options: RunOptions = self._get(self.config_init, "run")
        return options.folder, options.name or self.command.default_name

    def _own_callbacks(self, own_loggers: bool, of_spine: list[Callback]) -> list[Callback]:
        begins, (root, name) = self._begins, self._place
        self._report = Report(self.command.to_go_on, [*self.command.notes, *restart_advice()])
        recipe = self.recipe
        recipe["run"]["name"] = name  # so that the stored recipe, run by its path, still has this name
        alone = begins.weights_alone
        self._session = Session(root, name, recipe, begins.checkpoint, begins.resumed, own_loggers, weights_alone=alone)
        self.model.initial_weights = begins.checkpoint if alone else None
        return [
            self._session,
            *of_spine,
            self._get(self.config_init, "control"),
            self._get(self.config_init, "graceful_stop"),
            self._report,
            self._get(self.config_init, "checkpoints"),
        ]

    def _spine(self, given: list[Callback]) -> list[Callback]:
        validate_every, saves = self._get(self.config, "validate_every"), self._get(self.config_init, "checkpoints")
        return spine(self.datamodule, validate_every, self._surgery(), given, saves.in_background)

    def _surgery(self) -> Surgery:
        options: SurgeryOptions = self._get(self.config_init, "surgery")
        if options.operations and self._begins.checkpoint is None and self.command.name == "fit":
            raise ValueError(
                f"{options.asked}: is done on a checkpoint; give --ckpt_path, or leave it out: a new run has what"
                " model.gpt says from the start."
            )
        if self._begins.weights_alone:
            self.model.operations = tuple(options.operations)
        return Surgery(options)

    # -- running -----------------------------------------------------------------------------------------------------

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        path = self._begins.goes_on_from
        kwargs["ckpt_path"] = None if path is None else str(path)
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
        report_here()
        try:
            self._run_or_recover(subcommand)
        except RecoveryStopped as error:
            raise RunStopped(str(error)) from error
        except KillFileExists as error:
            raise RunForbidden(str(error)) from error
        except Exception as error:
            if not is_for_the_user(error):
                if (full := caused_by(error, FULL)) is None:
                    raise
                raise RunFailed(full_disk_sentence(full, self._session.folder or self._place[0])) from error
            # A checkpoint that cannot be read or written is no fault of the recipe.
            failed = self._report.started or isinstance(error, CheckpointError)
            raise (RunFailed if failed else UserError)(sentence(error)) from error
        finally:
            self._session.leave()
        checkpoint = self._begins.checkpoint
        if subcommand == "fit" and checkpoint and not self._report.started:
            steps = Progress.of(self.trainer).steps
            self._session.remove_unused()
            say(f"nothing to do: {checkpoint} is at step {steps}; set --trainer.max_steps above it to go on.")

    def _page(self, devices: int) -> str:
        """What `check` prints; with `--trace` the file is written too."""
        path, steps = self._get(self.config, "trace"), self.trainer_options["max_steps"]
        traced = self._trace() if path is not None or steps <= _AT_A_GLANCE else None
        page = check(
            *(self.model, self.datamodule, self.trainer_options, self.features, devices, self.mesh),
            published=self._get(self.config_init, "published"),
            trace=traced,
            checkpoints=self._get(self.config_init, "checkpoints"),
            validate_every=self._get(self.config, "validate_every"),
        )
        if path is None:
            return page
        if not traced:
            raise UserError(f"trainer.max_steps={steps}: a trace needs the end of the run; set it.")
        try:
            write_trace(path, traced)
        except OSError as error:
            raise UserError(f"trace={path}: cannot be written: {error.strerror}.") from error
        return f"{page}\n\ntrace: {steps:,} iterations in {path}"

    def _trace(self) -> Trace:
        data, module = self.datamodule, self.model
        return trace(
            module.schedule,
            module.optimizer_options.weight_decay,
            data.global_batch,
            data.sequence_length,
            self.features.values(),
            self.trainer_options["max_steps"],
            self._begins.step,
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
        if signal := self._get(self.config_init, "graceful_stop").signal:
            return _SIGNALLED + int(signal)
        return ORDERED if self._get(self.config_init, "control").stopped else 0
