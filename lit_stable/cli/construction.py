"""Every problem that shows only when the parts of a recipe are built, in one go.

jsonargparse builds part after part and stops at the first that refuses its values, inside a message about unions.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.strategies import StrategyRegistry

from lit_stable.callbacks import GracefulStop, RunControl
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.cadence import Every, parse_cadence
from lit_stable.cli.features import FEATURES, nested_options
from lit_stable.cli.patterns import optimizer_options
from lit_stable.cli.published import Published
from lit_stable.cli.systems import system_parts
from lit_stable.model.config import GPTConfig
from lit_stable.model.tensor_parallel import tensor_parallel_problems
from lit_stable.optim.schedule import LRSchedule
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.session import RunOptions
from lit_stable.run.surgery import SurgeryOptions, refuse_idle_surgery
from lit_stable.strategies.loss_scale import LossScale
from lit_stable.strategies.mesh import MeshOptions
from lit_stable.strategies.precisions import precision_problem
from lit_stable.strategies.predivide import refuse_factor
from lit_stable.strategies.selection import mesh_problems
from lit_stable.training_loss import TrainingLoss


def construction_problems(config: Namespace) -> list[str]:
    """Build each part of a parsed recipe by itself; what each says against its values."""
    problems = _strategy_problems(config["trainer"]["strategy"]) + _trainer_problems(config["trainer"])
    if (devices := config.get("devices")) is not None and devices < 1:  # of `check`
        problems.append(f"devices={devices}: must be at least 1, or null for those that the recipe names.")
    problems += _layout_problems(config) + _published_problems(config)
    for group, build in _builders(config):
        try:
            build()
        except (ValueError, MisconfigurationException) as error:
            problems += [group + line for line in str(error).splitlines()]
    return problems


# Options of Lightning's Trainer that would fight with what runs here, and what to write instead.
_REPLACED = {
    "limit_train_batches": "the data are endless; set trainer.max_steps",
    "val_check_interval": "validation follows what the run has consumed; set validate_every",
    "accumulate_grad_batches": "the window follows from data.global_batch and data.micro_batch; set those",
    "gradient_clip_val": "gradients are clipped by stability.grad_clip; set its max_norm",
    "fast_dev_run": "set --trainer.max_steps 2 instead",
    "overfit_batches": "the data are endless; give data.sources a small store",
}


_MOST_STEPS = 10_000_000_000  # their samples are a number of 64 bits, see `batch_sizes`


def _trainer_problems(trainer: Namespace) -> list[str]:
    """Options that are refused, and a precision that the strategy does not train in."""
    untouched = (None, False, 0, 0.0, 1)
    problems = [
        f"trainer.{name}={trainer[name]}: {remedy}."
        for name, remedy in _REPLACED.items()
        if trainer[name] not in (untouched if name == "accumulate_grad_batches" else untouched[:-1])
    ]
    if trainer["enable_checkpointing"] is False:
        problems.append(
            "trainer.enable_checkpointing=False: a run always writes checkpoints; set checkpoints.every_steps."
        )
    if trainer["max_steps"] > _MOST_STEPS:
        problems.append(f"trainer.max_steps={trainer['max_steps']}: must be at most {_MOST_STEPS:,}.")
    problem = precision_problem(strategy_name(trainer["strategy"]), trainer["precision"])
    return [*problems, *([problem] if problem else [])]


def strategy_name(strategy: Any) -> str:
    """The name of a strategy in a recipe, or that of its class where it is given as one."""
    return strategy if isinstance(strategy, str) else str(strategy["class_path"]).rsplit(".", 1)[-1]


def _layout_problems(config: Namespace) -> list[str]:
    """What keeps the strategy from laying out the ranks as asked, and the model from being split over them."""
    try:
        mesh, gpt = MeshOptions(**config["mesh"].as_dict()), GPTConfig(**config["model"]["gpt"].as_dict())
    except ValueError:  # each is judged by itself
        return []
    problems = mesh_problems(strategy_name(config["trainer"]["strategy"]), mesh)
    return problems or tensor_parallel_problems(gpt, mesh.tensor_parallel)


def _published_problems(config: Namespace) -> list[str]:
    """What is not as published of the model."""
    try:
        published, gpt = Published(**config["published"].as_dict()), GPTConfig(**config["model"]["gpt"].as_dict())
    except ValueError:  # each is judged by itself
        return []
    return published.problems(gpt)


def _strategy_problems(strategy: Any) -> list[str]:
    known = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(strategy, str) or strategy in known:
        return []
    near = difflib.get_close_matches(strategy, known, n=1)
    remedy = f"nearest is {near[0]}" if near else "take auto, ddp, fsdp2, fsdp2_full or fsdp"
    return [f"trainer.strategy={strategy}: is no strategy; {remedy}."]


def _builders(config: Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each part, after what its complaints lack in front to name the recipe's key."""
    model = config["model"]
    yield "", lambda: GPTConfig(**model["gpt"].as_dict())
    yield "model.", lambda: LRSchedule(**model["schedule"].as_dict())
    yield "model.", lambda: optimizer_options(model["optimizer"].as_dict())
    yield "", lambda: TrainingLoss(model["z_loss"])
    yield "", lambda: refuse_factor(model["gradient_predivide"])
    for part in system_parts(config):
        yield "", part
    yield "", lambda: Published(**config["published"].as_dict())
    yield "", lambda: MeshOptions(**config["mesh"].as_dict())
    yield "", lambda: LossScale(**config["loss_scale"].as_dict())
    yield "", lambda: _judge_surgery(config)
    yield "", lambda: Checkpoints(**config["checkpoints"].as_dict())
    yield "", lambda: _judge_validation(config["validate_every"])
    yield "", lambda: _judge_control(config["control"].as_dict())
    yield "", lambda: GracefulStop(**config["graceful_stop"].as_dict())
    yield "", lambda: RunOptions(**config["run"].as_dict())
    for name, feature in FEATURES.items():
        options = config[f"stability.{name}"]
        if options is not None:
            yield "", partial(_build_feature, feature, options.as_dict().get("init_args", {}))


def _judge_validation(every: Every) -> None:
    try:
        parse_cadence(every)
    except ValueError as error:
        raise ValueError(f"validate_every={every}: {error}") from None


def _judge_control(options: dict[str, Any]) -> None:
    RunControl(**options)
    path = options["kill_file"]
    if path is not None and Path(path).name in ("", ".."):  # a folder, which exists
        raise ValueError(f"control.kill_file={path!r}: names no file; give its path, or null for none.")


def _judge_surgery(config: Namespace) -> None:
    options = SurgeryOptions(**config["surgery"].as_dict())
    try:
        gpt = GPTConfig(**config["model"]["gpt"].as_dict())
    except ValueError:  # judged by itself
        return
    refuse_idle_surgery(options, gpt)


def _build_feature(feature: type[Callback], options: dict[str, Any]) -> Callback:
    """Build nested options, which arrive as mappings, then the feature; problems of all nested ones come at once."""
    problems = []
    for name, nested in nested_options(feature).items():
        value = options.get(name)
        if not isinstance(value, dict):
            continue
        try:
            # A dataclass that has a base arrives with its class beside its options.
            options = {**options, name: nested(**value.get("init_args", value))}
        except (ValueError, MisconfigurationException) as error:
            problems.append(str(error))
    if problems:
        raise MisconfigurationException("\n".join(problems))
    return feature(**options)
