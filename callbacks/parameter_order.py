"""Where each parameter stands in the optimizer's groups, by name.

An optimizer's saved state goes by place alone: moments that were saved in one order load in another without a word, on
to whatever parameter has the same shape. So the names are saved beside it, and compared before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .checkpoint_contents import CheckpointError
from .wrapper_names import unwrapped

Groups = list[list[str]]  # by group of the optimizer, the names of its parameters in their order


def names_by_group(optimizer: Optimizer, module: nn.Module) -> Groups | None:
    """The names of an optimizer's parameters as they are without wrappers; ``None`` if one is none of the module's."""
    names = {parameter: unwrapped(name) for name, parameter in module.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    if any(parameter not in names for group in groups for parameter in group):
        return None
    return [[names[parameter] for parameter in group] for group in groups]


def in_todays_order(
    path: Path, checkpoint: Mapping[str, Any], saved: Sequence[Groups | None], found: Sequence[Groups | None]
) -> dict[str, Any]:
    """A checkpoint whose optimizer states, where they go by place, list the parameters as today's optimizers do.

    Groups that have changed places are not put back: learning-rate schedulers save their rates by a group's place.

    Args:
        path: Of the checkpoint.
        checkpoint: As it was loaded; sharded optimizer states are not in it.
        saved: The names in each optimizer's groups when it was written; ``None`` where they were not known.
        found: The same today.

    Raises:
        CheckpointError: when a parameter stands in another group than before.
    """
    states = checkpoint.get("optimizer_states")
    ordered = [] if states is None else [*states]
    for number, (before, now) in enumerate(zip(saved, found, strict=False)):
        if before is None or now is None:
            continue
        by_place = states is not None and _is_by_place(states[number])
        if apart := difference(before, now, by_place):
            raise CheckpointError(
                f"{path}: {apart}, and would get another's state or rate; build the optimizer's groups as they were."
            )
        if by_place:
            ordered[number] = _reordered(ordered[number], before, now)
    return {**checkpoint} if states is None else {**checkpoint, "optimizer_states": ordered}


def _is_by_place(state: Mapping[str, Any]) -> bool:
    """Whether a state numbers its parameters: one device and DDP do, FSDP1 and FSDP2 name them."""
    return all(isinstance(p, int) for group in state["param_groups"] for p in group["params"])


def difference(saved: Groups, found: Groups, by_place: bool) -> str | None:
    """The first parameter that stands in another group than before, in a phrase; ``None`` if there is none.

    Args:
        saved: The groups that were saved.
        found: Today's.
        by_place: Whether one that stands in no group on one side counts too.
    """
    before = {name: number for number, names in enumerate(saved) for name in names}
    now = {name: number for number, names in enumerate(found) for name in names}
    for name in [*now, *(name for name in before if name not in now)]:
        if before.get(name) != now.get(name) and (by_place or (name in before and name in now)):
            return f"{name} stands in {_group(before.get(name))} of its optimizer and in {_group(now.get(name))} today"
    return None


def _group(number: int | None) -> str:
    return "no group" if number is None else f"group {number}"


def _reordered(state: Mapping[str, Any], saved: Groups, found: Groups) -> dict[str, Any]:
    groups = []
    for group, names, wanted in zip(state["param_groups"], saved, found, strict=True):
        number = dict(zip(names, group["params"], strict=True))
        groups.append({**group, "params": [number[name] for name in wanted]})
    return {**state, "param_groups": groups}
