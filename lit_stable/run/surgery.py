"""Norms put into a running model, or another activation: explicit, and with a new warm-up of the rate."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch import LightningModule, Trainer

from lit_stable.callbacks import EffectiveLR, Progress
from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.base import MisconfigurationException, StabilityCallback
from lit_stable.callbacks.events import Event, emit
from lit_stable.callbacks.optimizer_state import zero_state
from lit_stable.callbacks.progress import Mark
from lit_stable.callbacks.shards import has_fsdp1
from lit_stable.model.config import GPTConfig
from lit_stable.model.insertion import (
    POINTWISE,
    Insertion,
    Swap,
    has_norm,
    inserted_names,
    operations_between,
    out_of_sight,
)
from lit_stable.model.same_model import model_changes
from lit_stable.module import GPTModule
from lit_stable.weights.stored_model import read_record

_LOADS = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")


@judges_arguments(ValueError, "surgery")
@dataclass(frozen=True)
class SurgeryOptions:
    """What may be done to the model of a checkpoint.

    Raises:
        ValueError: with one line per problem.
    """

    insert: list[Insertion] = field(default_factory=list)
    """Norms that `model.gpt` has and the checkpoint's model had not: qk_norm, embed_norm. Their gains begin at one,
    which is a norm all the same: what the model computes changes with the first step."""

    moments: Literal["keep", "reset"] = "keep"
    """What becomes of the optimizer's state of the parameters that were there. reset: moments and step counts begin at
    zero."""

    rewarmup: int = 100
    """Optimizer steps over which the learning rate rises from 0 to the schedule's again; 0: none."""

    swap: list[Swap] = field(default_factory=list)
    """activation: `model.gpt.mlp` may be another of gelu, gelu_tanh and relu than the checkpoint's, as OPT's run 11.10
    went from GELU to ReLU. The weights stay; what the model computes changes with the first step."""

    def __post_init__(self) -> None:
        problems = []
        if len(set(self.insert)) < len(self.insert):
            problems.append(f"surgery.insert={self.insert}: names a norm twice; name each once.")
        if len(set(self.swap)) < len(self.swap):
            problems.append(f"surgery.swap={self.swap}: names it twice; once is enough.")
        if self.rewarmup < 0:
            problems.append(f"surgery.rewarmup={self.rewarmup}: must be 0 or more.")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def operations(self) -> list[str]:
        """All that is asked for."""
        return [*self.insert, *self.swap]

    @property
    def asked(self) -> str:
        """The keys that ask for something, with their values."""
        asked = {"insert": self.insert, "swap": self.swap}
        return ", ".join(f"surgery.{name}={value}" for name, value in asked.items() if value)


def refuse_idle_surgery(options: SurgeryOptions, config: GPTConfig) -> None:
    """Raise ValueError where the model does not have what is to be inserted."""
    own = {"qk_norm": config.qk_norm, "embed_norm": config.has_embed_norm}
    idle = [what for what in options.insert if not has_norm(what, own)]
    if idle:
        raise ValueError(
            f"surgery.insert={options.insert}: model.gpt.{idle[0]}={own[idle[0]]}, so there is nothing to insert; set"
            f" model.gpt.{idle[0]} too."
        )
    if options.swap and config.mlp not in POINTWISE:
        raise ValueError(
            f"surgery.swap={options.swap}: model.gpt.mlp={config.mlp} has matrices of its own, so there is nothing to"
            f" swap; take one of {', '.join(POINTWISE)}."
        )


class Surgery(StabilityCallback):
    """Insert norms into the model of a checkpoint, or swap its activation, when a run goes on from it.

    The checkpoint is loaded while the norms are out of sight, so that everything that guards a load holds as it always
    does, under one process, ddp and fsdp2, from one file and from a sharded folder. Then they stand in their places:
    gains at one (the learned scale of ``qk_norm: l2`` where a new run has it), fresh state in the optimizer's groups
    where a new run would have them. An activation has no weights: with ``swap`` the load finds all as it was. Other
    moments are kept, or set to zero. For ``rewarmup`` steps the rate is the schedule's times k / rewarmup, k counting
    from 0 (by ``EffectiveLR``: logged as ``stability/lr``). What was done is an event of kind ``surgery`` in
    ``events.jsonl``.

    A checkpoint that has the norms or the activation already is loaded as it is: the key may stay in the recipe.
    Without the key, one that lacks them is refused, and so is one with a norm that the model has not: nothing is taken
    out.

    Resumes: the checkpoint holds where the rise began, so a resume within it goes on with it, even without the key.

    Source: Marin's 32B run, whose instabilities between steps 70k and 80k ended when norms of queries and keys were put
    in, and not by tighter clipping. OPT-175B's run 11.10, which got ReLU in place of GELU.

    Args:
        options: See ``SurgeryOptions``.

    Raises:
        MisconfigurationException: when the checkpoint's model is another than that; for an insertion under FSDP1.
    """

    order: ClassVar[int] = 91  # behind `SafeCheckpoints`, which compares step counts that a reset sets to zero

    def __init__(self, options: SurgeryOptions) -> None:
        self.options = options
        self.begun: Mark | None = None
        """Where the run stood when it was operated on last."""
        self.rewarmup = options.rewarmup
        self._due: list[str] = []  # to be done by the load under way
        self._before = ""  # the activation of the checkpoint
        self._strategy: Any = None
        self._effective: EffectiveLR | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or self._strategy is trainer.strategy:
            return
        strategy = self._strategy = trainer.strategy
        # On the instance, around what `SafeCheckpoints` has put there before: it sees the model of the checkpoint.
        strategy.load_checkpoint = self._around_load(trainer, strategy.load_checkpoint)  # type: ignore[method-assign]
        for name in _LOADS[1:]:
            setattr(strategy, name, self._hidden(trainer, getattr(strategy, name)))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._effective is not None:
            self._effective.remove("Surgery")
        if self._strategy is not None:
            for name in _LOADS:  # what is below them is torn down with this
                self._strategy.__dict__.pop(name, None)
        self._strategy = self._effective = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stay in place, as what it stands around does."""

    # -- loading -----------------------------------------------------------------------------------------------------

    def _around_load(self, trainer: Trainer, load: Callable[..., Any]) -> Callable[..., Any]:
        hidden = self._hidden(trainer, load)

        def load_checkpoint(checkpoint_path: Any, *args: Any, **options: Any) -> Any:
            self._due = self._judge(trainer, Path(checkpoint_path))
            return hidden(checkpoint_path, *args, **options)

        return load_checkpoint

    def _judge(self, trainer: Trainer, path: Path) -> list[str]:
        """What is to be done; raises when the checkpoint is of any other model."""
        module = trainer.lightning_module
        assert isinstance(module, GPTModule)
        stored = _stored_options(path)
        if not stored:  # unreadable, or of another project: the load itself says so
            return []
        due = [what for what in operations_between(module.config, stored) if what in self.options.operations]
        problems, _ = model_changes(module.config, stored, due)
        norms = [what for what in due if what in self.options.insert]
        if norms and has_fsdp1(trainer.strategy.model):
            problems = [f"surgery.insert={norms}: FSDP1 flattens what it shards; take trainer.strategy fsdp2 or ddp."]
        if problems:
            raise MisconfigurationException("\n".join(problems))
        module.operations = tuple(due)
        self._before = stored.get("mlp", GPTConfig.mlp)
        return due

    def _hidden(self, trainer: Trainer, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_hidden(*args: Any, **options: Any) -> Any:
            module = trainer.lightning_module
            assert isinstance(module, GPTModule)
            assert module.gpt is not None
            with out_of_sight(module.gpt, trainer.optimizers, self._due):
                return load(*args, **options)

        return load_hidden

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        # Not in `setup`: without an operation nothing is modified, and not later: it has hooks of its own.
        if self._due or (checkpoint.get("callbacks", {}).get(self.state_key) or {}).get("begun"):
            self._effective = EffectiveLR.of(trainer)
            self._effective.add("Surgery", lambda mark, lr, group: lr * self.factor(mark))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        due, self._due = self._due, []
        if not due:
            return
        assert isinstance(pl_module, GPTModule)
        assert pl_module.gpt is not None
        pl_module.operations = ()
        self.begun, self.rewarmup = Progress.of(trainer).mark, self.options.rewarmup
        if self.options.moments == "reset":
            for optimizer in trainer.optimizers:
                zero_state(optimizer)
        evidence: dict[str, Any] = {"moments": self.options.moments, "rewarmup": self.rewarmup}
        if inserted := [what for what in due if what != "activation"]:
            evidence |= {"inserted": inserted, "parameters": inserted_names(pl_module.gpt, inserted)}
        if "activation" in due:
            evidence["swapped"] = f"{self._before} -> {pl_module.config.mlp}"
        emit(trainer, Event(self.begun.steps + 1, "surgery", evidence))

    def factor(self, mark: Mark) -> float:
        """What the rate of the step that opened at these counters is multiplied with."""
        if self.begun is None or self.rewarmup == 0:
            return 1.0
        return min(1.0, (mark.steps - self.begun.steps) / self.rewarmup)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self.begun is None else {"begun": list(self.begun), "rewarmup": self.rewarmup}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "begun" in state_dict:
            self.begun = Mark(*state_dict["begun"])
            self.rewarmup = self.options.rewarmup if self.options.operations else state_dict["rewarmup"]


def _stored_options(path: Path) -> dict[str, Any]:
    try:
        options: dict[str, Any] = read_record(path).get("model", {})
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError, pickle.UnpicklingError):
        return {}
    return options
