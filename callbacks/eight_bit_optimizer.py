"""Adam and AdamW whose moments are kept in 8 bit: what an optimizer is turned into, in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from .base import MisconfigurationException, rank_zero_info
from .eight_bit_blocks import StateMap, rows_of, state_maps
from .eight_bit_layout import Bits, TensorPlan
from .eight_bit_states import KEYS, MOMENTS, bits_of, convert, fresh_state, moment, place
from .eight_bit_step import AdamArguments, Piece, step_8_bit, step_32_bit
from .shards import local

STATE_MAP = "state_map"  # key of the parameter groups, so that a checkpoint tells what its codes stand for


@dataclass(frozen=True)
class StatePlan:
    """How the states of an optimizer are to be kept.

    Attributes:
        tensors: By parameter, for all parameters of the module.
        state_map: What codes stand for.
        converts: Whether a checkpoint that keeps them otherwise is converted; else it is refused.
    """

    tensors: Mapping[nn.Parameter, TensorPlan]
    state_map: StateMap
    converts: bool

    @property
    def has_codes(self) -> bool:
        """Whether anything is kept in 8 bit."""
        return any(plan.bits == 8 for plan in self.tensors.values())


class _Blockwise(Optimizer):
    """Steps on local shards, keeps each moment as its state says (8 or 32 bit), and behaves as fused.

    Attributes:
        plan: While a fit runs; without one, states stay as they are, and new ones are 32 bit.
    """

    plan: StatePlan | None = None
    _step_supports_amp_scaling = True  # a gradient scaler leaves the division, and the skip, to the kernel

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; with ``found_inf`` 1.0 on this optimizer nothing changes, ``grad_scale`` divides gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        stepped = [p for p in group["params"] if p.grad is not None]
        if not stepped:
            return
        self._fill(stepped)
        steps = [self.state[p]["step"] for p in stepped]
        arguments = self._arguments(group)
        torch._foreach_add_(steps, 1.0)
        wide = []
        for p in stepped:
            state, piece, gradient = self.state[p], local(p), _local_gradient(p)
            if bits_of(state) == 32:
                exp_avg, exp_avg_sq = (local(state[name]) for name in MOMENTS)
                wide.append(Piece(piece, gradient, exp_avg, exp_avg_sq, state["step"]))
                continue
            rows, maps = rows_of(p), state_maps(arguments.state_map, piece.device)
            first, second = (moment(state, name, qmap, rows) for name, qmap in zip(MOMENTS, maps, strict=True))
            step_8_bit(piece, gradient, first, second, state["step"], rows, arguments)
        step_32_bit(wide, arguments)
        if arguments.found_inf is not None:
            torch._foreach_sub_(steps, [arguments.found_inf] * len(steps))

    def _arguments(self, group: dict[str, Any]) -> AdamArguments:
        return AdamArguments(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            decoupled=group.get("decoupled_weight_decay", isinstance(self, AdamW)),
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            state_map=group.get(STATE_MAP, "dynamic"),
        )

    # -- state -------------------------------------------------------------------------------------------------------

    def initialise_state(self) -> None:
        """Give every parameter that has none the state that its first step would create."""
        self._fill(self._parameters())

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _planned(self, parameter: nn.Parameter) -> TensorPlan | None:
        return None if self.plan is None else self.plan.tensors.get(parameter)

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                planned = self._planned(parameter)
                self.state[parameter] = fresh_state(parameter, 32 if planned is None else planned.bits)

    def take_over(self, plan: StatePlan) -> None:
        """Follow a plan: convert the state that the optimizer has learned, and make any other fresh, one by one."""
        self.plan = plan
        learned: StateMap = next((g[STATE_MAP] for g in self.param_groups if STATE_MAP in g), "dynamic")
        self._claim_groups()
        for parameter in self._parameters():
            if (state := self.state[parameter]) and float(state["step"]) > 0:
                self.state[parameter] = self._restored(parameter, state, bits_of(state) or 32, learned)
            else:
                self.state[parameter] = {}
                self._fill([parameter])

    def _claim_groups(self) -> None:
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, False
            if self.plan is not None:
                _name_map(group, self.plan.state_map if self.plan.has_codes else None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also behind the conversion: a group stands under the plan like any other."""
        super().add_param_group(param_group)
        if self.plan is not None:
            self._claim_groups()

    # -- loading -----------------------------------------------------------------------------------------------------

    def expect(self, kept: Mapping[str, Bits], names_map: bool) -> None:
        """Take the form of a sharded checkpoint, which is loaded into the state that is there.

        Args:
            kept: Bits of its moments, by the names of parameters.
            names_map: Whether its groups say what codes stand for.

        Raises:
            MisconfigurationException: when it differs from the plan and is not to be converted.
        """
        assert self.plan is not None
        planned = {p: plan for p in self._parameters() if (plan := self._planned(p)) is not None}
        other = {p: kept[plan.name] for p, plan in planned.items() if kept.get(plan.name, plan.bits) != plan.bits}
        self._refuse_other_forms({p: _form(bits, self.plan.state_map) for p, bits in other.items()})
        for parameter, bits in other.items():
            self.state[parameter] = fresh_state(parameter, bits)
        for group in self.param_groups:
            _name_map(group, self.plan.state_map if names_map else None)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, in the dtypes in which it was saved, and convert what the plan keeps in another form."""
        for group in state_dict["param_groups"]:
            refuse_options(group)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        states = {p: state_dict["state"].get(n, {}) for n, p in zip(numbers, self._parameters(), strict=False)}
        bits = {p: self._saved_bits(p, state) for p, state in states.items() if state}
        state_map: StateMap = next((g[STATE_MAP] for g in state_dict["param_groups"] if STATE_MAP in g), "dynamic")
        self._refuse_other_forms({p: _form(b, state_map) for p, b in bits.items()})
        super().load_state_dict({**state_dict, "state": {}})  # its cast to the parameters' dtype would ruin codes
        self._claim_groups()
        for parameter, saved in bits.items():
            self.state[parameter] = self._restored(parameter, states[parameter], saved, state_map)

    def _saved_bits(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> Bits:
        found = [bits for bits in KEYS if all(key in state for key in KEYS[bits])]
        if not found:
            raise MisconfigurationException(
                f"`EightBitAdam`: the checkpoint keeps {', '.join(map(str, state))} of a parameter, which is no state"
                " of Adam or AdamW that it knows; start with fresh moments."
            )
        planned = self._planned(parameter)
        # torch's loader of whole files leaves the present state beside the saved one where their names differ.
        return next((b for b in found if planned is not None and b != planned.bits), found[0])

    def _restored(self, parameter: nn.Parameter, state: Mapping[str, Any], bits: Bits, saved: StateMap) -> Any:
        kept = {key: place(parameter, key, state[key]) for key in ("step", *KEYS[bits])}
        planned = self._planned(parameter)
        return kept if planned is None else convert(parameter, kept, planned.bits, self._map, saved)

    @property
    def _map(self) -> StateMap:
        return "dynamic" if self.plan is None else self.plan.state_map

    def _refuse_other_forms(self, saved: Mapping[nn.Parameter, str]) -> None:
        """Raise for forms that the plan does not want, or say in a line that they are converted."""
        names: dict[tuple[str, str], list[str]] = defaultdict(list)
        for parameter, form in saved.items():
            planned = self._planned(parameter)
            if planned is not None and form != (wanted := _form(planned.bits, self._map)):
                names[form, wanted].append(planned.name)
        if not names or self.plan is None:
            return
        listed = "; ".join(f"{found} to {wanted}: {_listed(which)}" for (found, wanted), which in names.items())
        if not self.plan.converts:
            raise MisconfigurationException(
                f"`EightBitAdam(on_load='refuse')`: the checkpoint keeps moments in another form than this run,"
                f" {listed}; set on_load: convert."
            )
        rank_zero_info(f"EightBitAdam: converts the checkpoint's moments, {listed}")


class BlockwiseAdam(_Blockwise, Adam):
    """Adam, whose weight decay is added to the gradient."""


class BlockwiseAdamW(_Blockwise, AdamW):
    """AdamW, whose weight decay acts on the weights."""


def is_blockwise(optimizer: Any) -> bool:
    """Whether an optimizer was converted."""
    return isinstance(optimizer, _Blockwise)


def _name_map(group: dict[str, Any], state_map: StateMap | None) -> None:
    if state_map is None:
        group.pop(STATE_MAP, None)
    else:
        group[STATE_MAP] = state_map


def refuse_options(group: Mapping[str, Any]) -> None:
    """Raise for options of Adam that no kernel here has."""
    for name in ("amsgrad", "differentiable"):
        if group.get(name):
            raise MisconfigurationException(f"`Adam({name}=True)`: `EightBitAdam` has no such step; leave it out.")


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise MisconfigurationException(
            "`EightBitAdam`: a gradient is sparse, and its kernel takes dense ones; build the embedding with"
            " sparse=False."
        )
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def _form(bits: Bits, state_map: StateMap) -> str:
    return "32 bit" if bits == 32 else f"8 bit ({state_map})"


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + rest
