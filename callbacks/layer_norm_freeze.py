"""Freeze layer norms, or any modules, for windows of a run or for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from .base import MisconfigurationException, StabilityCallback, is_logging_step, log_number, rank_zero_info
from .events import Event, Events, emit
from .freeze_rules import FreezeRule, Rule, check_rules
from .module_patterns import import_types, norm_parameter_names, select
from .optimizer_state import initialise_state, zero_state
from .progress import Progress
from .rounding import warn_of_rounding
from .shards import has_flat_parameters, has_fsdp1
from .step_hooks import refuse_engine
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LayerNormFreeze(StabilityCallback):
    """Keep chosen parameters bit-identical for windows of progress: norm layers, or whole modules around them.

    A rule freezes what it selects while ``start <= progress < stop``, progress being what was committed before the
    step. Rules add up: a parameter is frozen while any rule that selects it holds. Norms are found by type (names
    such as ``ln_1`` do not tell), other modules by patterns on their names as they are before any wrapping.

    Windows: parameters keep ``requires_grad=True`` and stay in the optimizer, and their gradients are dropped before
    the norm is taken. So neither decay nor momentum moves them, gradients are reduced again from the first step after
    the window on, groups never change, and a resume lands in the right state whatever the windows were before. It
    saves no memory or time.

    For good (``start`` 0, no ``stop``): ``requires_grad=False`` before the strategy wraps the model and before
    ``configure_optimizers`` runs, so no gradient is ever computed. An optimizer built from trainable parameters leaves
    them out; so to freeze or free them at a resume, write a window instead. ``teardown`` sets them free again.

    Adam's and AdamW's state exists for every parameter from the start, as the checkpoints of sharded runs need.
    Nothing is saved: what is frozen follows from the progress. Works on one device, DDP, FSDP2, and FSDP1 with
    ``use_orig_params=True``. Under pure bf16 a gain near 1 cannot move at a learning rate below 1/512, frozen or not:
    that is warned of. Source: the norms of a frozen language model set free in mid-run (Hugging Face VLM); LayerNorm
    tuning, Zhao et al. 2023, arXiv:2312.11420.

    Logged: ``stability/frozen_tensors`` (number of parameters frozen in this step, at logging steps). Each change is
    an event of kind ``freeze`` or ``set_free`` (see :class:`~.events.Events`). A resume within a window prints its line
    again, and is no event; nothing being saved, it takes the step before for as large as its own first one.

    Args:
        rules: What to freeze when; mappings with the keys ``modules`` (list of shell patterns for module names,
            default all), ``norms`` (``only``, the default; ``except``; ``with``), ``start`` (default 0), ``stop``
            (default: never).
        unit: Of ``start`` and ``stop``: optimizer ``steps``, ``samples`` or ``tokens``.
        moments: ``keep``: a parameter goes on with the moments it had; ``reset``: they and its step count are zeroed
            when it is frozen.
        norm_types: Import paths of further classes that are norms, besides those named ``...LayerNorm`` or
            ``...RMSNorm`` and what derives from them. Scales of heads and cosines in lit-stable's GPT, and gates, are
            none without ``lit_stable.model.norm.Gain``.
        action: ``act``, or ``log``: the same metric and messages, and nothing is touched.

    Raises:
        MisconfigurationException: when a rule is malformed or selects nothing (near names are listed), when what is to
            be freed has ``requires_grad=False`` already or stands in no optimizer, when nothing is left to train, or
            under an FSDP1 that cannot freeze parts.

    Example::

        >>> LayerNormFreeze([{"stop": 1000}])  # all norms, for the first thousand steps  # doctest: +SKIP
        >>> LayerNormFreeze(  # a frozen backbone whose norms are set free at step 500  # doctest: +SKIP
        ...     [{"modules": ["backbone"], "norms": "except"}, {"modules": ["backbone"], "stop": 500}]
        ... )
    """

    order: ClassVar[int] = 20

    def __init__(
        self,
        rules: list[FreezeRule],
        unit: Literal["steps", "samples", "tokens"] = "steps",
        moments: Literal["keep", "reset"] = "keep",
        norm_types: list[str] | None = None,
        action: Literal["act", "log"] = "act",
    ) -> None:
        self.rules = check_rules(rules)
        self.unit = unit
        self.moments = moments
        self.norm_types = import_types(norm_types or [])
        self.action = action
        self._module: LightningModule | None = None
        self._constant: set[str] = set()  # names of the parameters whose requires_grad was cleared here
        self._selected: list[set[str]] = []  # names, by rule
        self._members: list[tuple[list[Rule], list[nn.Parameter]]] = []
        self._zeroed: set[nn.Parameter] = set()
        self._held: list[bool] = []  # by rule, in the step before; empty before the first of a fit

    # -- what is to be frozen ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_what_cannot_freeze_parts(trainer)
        Progress.of(trainer)
        Events.of(trainer)
        self._undo()  # after a fit that ended with an exception, so without a teardown
        self._module = pl_module
        if type(pl_module).configure_model.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
            self._select(pl_module)
            return
        # The module is complete after this hook; the strategy wraps it right after, and no callback is asked between.
        build = pl_module.configure_model

        def build_then_select() -> None:
            build()
            self._select(pl_module)

        pl_module.configure_model = build_then_select  # type: ignore[method-assign]

    def _select(self, module: LightningModule) -> None:
        self._selected = [select(module, rule.modules, rule.norms, self.norm_types) for rule in self.rules]
        constant, windowed = self._constant_and_windowed()
        parameters = {unwrapped(name): p for name, p in module.named_parameters()}
        closed = sorted(name for name in windowed if not parameters[name].requires_grad)
        if closed:
            raise MisconfigurationException(
                f"`LayerNormFreeze`: {_listed(closed)} has requires_grad=False already, so no window could set it free;"
                " leave all freezing to the callback's rules."
            )
        # Those cleared here count too: another callback may have called configure_model before Lightning does.
        trainable = {name for name, p in parameters.items() if p.requires_grad} | self._constant
        if trainable <= constant:
            raise MisconfigurationException(
                f"`LayerNormFreeze`: freezes all {len(trainable)} parameters for good, so nothing is left to train;"
                " give a rule fewer modules, or a stop."
            )
        if self.action == "log" or not constant & trainable:
            return
        if has_fsdp1(module):
            raise MisconfigurationException(
                f"`LayerNormFreeze`: {_listed(sorted(constant & trainable))} is wrapped by FSDP1 already, too late to"
                " be frozen for good; set requires_grad=False in configure_model before wrapping, or give a stop."
            )
        self._constant = constant & trainable
        for name in self._constant:
            parameters[name].requires_grad_(False)

    def frozen_for_good(self, module: nn.Module) -> set[str]:
        """Names of the parameters of a module, or of an outline of it, that no step of a fit would move."""
        rules = [rule for rule in self.rules if rule.for_good]
        return {name for rule in rules for name in select(module, rule.modules, rule.norms, self.norm_types)}

    def _constant_and_windowed(self) -> tuple[set[str], set[str]]:
        pairs = list(zip(self.rules, self._selected, strict=True))
        constant = {name for rule, names in pairs if rule.for_good for name in names}
        return constant, {name for _, names in pairs for name in names} - constant

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Wrapped, sharded or not: by now the module's parameters are those that the optimizer holds.
        parameters = {unwrapped(name): p for name, p in pl_module.named_parameters()}
        optimized = {p for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        _, windowed = self._constant_and_windowed()
        outside = sorted(name for name in windowed if parameters[name] not in optimized)
        if outside:
            raise MisconfigurationException(
                f"`LayerNormFreeze`: {_listed(outside)} stands in no optimizer, so it would stay as it is outside its"
                " window too; give configure_optimizers every parameter with requires_grad=True."
            )
        members: dict[tuple[bool, ...], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            members.setdefault(tuple(name in names for names in self._selected), []).append(parameter)
        self._members = [
            ([rule for rule, has in zip(self.rules, key, strict=True) if has], held)
            for key, held in members.items()
            if any(key)
        ]
        for optimizer in trainer.optimizers:
            initialise_state(optimizer)
        gains = {n for n in windowed & norm_parameter_names(pl_module, self.norm_types) if not n.endswith("bias")}
        warn_of_rounding(trainer.optimizers, {parameters[name] for name in gains})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Again after a load: torch's distributed loader drops the state of what has requires_grad=False, and the next
        # checkpoint would lack it.
        for optimizer in trainer.optimizers:
            initialise_state(optimizer)
        self._zeroed, self._held = set(), []

    # -- freezing ----------------------------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        progress = int(getattr(Progress.of(trainer).start, self.unit))
        self._announce(trainer, progress)
        frozen = 0
        for rules, parameters in self._members:
            holds = any(rule.holds(progress) for rule in rules)
            frozen += len(parameters) * holds
            if holds and self.action == "act":
                self._freeze(trainer, parameters)
            elif not holds:
                self._zeroed.difference_update(parameters)
        if is_logging_step(trainer):
            log_number(pl_module, "stability/frozen_tensors", frozen)

    def _freeze(self, trainer: Trainer, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
        if self.moments == "reset":  # once per window; once more after a resume inside it, where all is zero already
            fresh = [p for p in parameters if p not in self._zeroed]
            for optimizer in trainer.optimizers:
                zero_state(optimizer, fresh)
            self._zeroed.update(fresh)

    def _announce(self, trainer: Trainer, progress: int) -> None:
        counts = Progress.of(trainer)
        size = getattr(counts.mark, self.unit) - progress
        before = self._held or [rule.holds(progress - size) for rule in self.rules]
        is_first, self._held = not self._held, [rule.holds(progress) for rule in self.rules]
        would = "would " if self.action == "log" else ""
        for held, holds, names in zip(before, self._held, self._selected, strict=True):
            verb = "freeze" if holds else "set free"
            text = f"LayerNormFreeze, {self.unit} {progress}: {would}{verb} {_listed(sorted(names))}"
            if held != holds:
                evidence = {self.unit: progress, "tensors": len(names), "acted": self.action == "act"}
                emit(trainer, Event(counts.steps, verb.replace(" ", "_"), evidence, text=text), warns=False)
            elif holds and is_first:
                rank_zero_info(text)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo()

    def _undo(self) -> None:
        if self._module is not None:
            self._module.__dict__.pop("configure_model", None)
            for name, parameter in self._module.named_parameters():
                if unwrapped(name) in self._constant:
                    parameter.requires_grad_(True)
        self._module, self._constant = None, set()
        self._members, self._zeroed = [], set()


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def refuse_what_cannot_freeze_parts(trainer: Trainer) -> None:
    """Raise under an FSDP1 whose flat parameters mix frozen and free ones, or with a scaler that needs gradients."""
    refuse_engine(trainer, "LayerNormFreeze")
    if has_flat_parameters(trainer):
        raise MisconfigurationException(
            "`FSDPStrategy(use_orig_params=False)`: its flat parameters hold frozen and trained ones together, so"
            " `LayerNormFreeze` could freeze neither alone; set use_orig_params=True."
        )
    if type(getattr(trainer.precision_plugin, "scaler", None)).__name__ == "ShardedGradScaler":
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})`: its sharded gradient scaler fails on a rank whose gradients"
            " are all dropped by `LayerNormFreeze`; use bf16-mixed."
        )
