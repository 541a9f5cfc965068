"""What may be done to a model that was trained otherwise, and how to take inserted norms out of sight for a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT

Insertion = Literal["qk_norm", "embed_norm"]
Swap = Literal["activation"]

#: Values of `mlp` between which the matrices of an MLP mean the same to it, up to the function of one number.
POINTWISE = ("gelu", "gelu_tanh", "relu")

#: What else may be otherwise with a norm that was not there: options that nothing read before, or read from now on.
MAY_CHANGE_WITH: dict[str, tuple[str, ...]] = {
    "qk_norm": ("qk_norm", "qk_l2_scale", "attention_scale"),
    "embed_norm": ("embed_norm", "embed_scale"),  # the norm takes the scale out again
    "activation": ("mlp",),
}


def has_norm(what: str, options: Mapping[str, Any]) -> bool:
    """Whether a model with these options has a norm that can be inserted."""
    if what == "qk_norm":
        return bool(options.get("qk_norm", "none") != "none")
    return bool(options.get("embed_norm", False) or options.get("stable_embedding", False))


def operations_between(config: GPTConfig, stored: Mapping[str, Any]) -> list[str]:
    """What is to be done to the model whose options are stored: norms that it had not, another activation."""
    own = {"qk_norm": config.qk_norm, "embed_norm": config.has_embed_norm}
    missing = [what for what in own if has_norm(what, own) and not has_norm(what, stored)]
    return [*missing, *(["activation"] if is_swap(stored.get("mlp", GPTConfig.mlp), config.mlp) else [])]


def is_swap(old: str, new: str) -> bool:
    """Whether two different values of `mlp` differ in the function of one number alone."""
    return old != new and old in POINTWISE and new in POINTWISE


@contextmanager
def out_of_sight(gpt: GPT, optimizers: Sequence[Optimizer], inserted: Sequence[str]) -> Iterator[None]:
    """Hide inserted norms from whoever looks: the model and its optimizers are as they were before the insertion.

    So a checkpoint of that model loads by whatever way, file or folder, whole or sharded. Afterwards the norms stand in
    their places again, with the values and the optimizer state that they had; a group that is theirs alone is hidden
    whole.
    """
    places = list(_places(gpt, inserted))
    hidden = {p for owner, name in places for p in getattr(owner, name).parameters()}
    norms = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, None if owner is gpt else nn.Identity())
    seen = [_HiddenParameters(optimizer, hidden) for optimizer in optimizers]
    try:
        yield
    finally:
        for (owner, name), norm in zip(places, norms, strict=True):
            setattr(owner, name, norm)
        for one in seen:
            one.put_back()


def inserted_names(gpt: GPT, inserted: Sequence[str]) -> list[str]:
    """Names in the model of the parameters of inserted norms."""
    hidden = {p for owner, name in _places(gpt, inserted) for p in getattr(owner, name).parameters()}
    return [name for name, parameter in gpt.named_parameters() if parameter in hidden]


def _places(gpt: GPT, inserted: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    """(owner, attribute) of each inserted module."""
    if "embed_norm" in inserted:
        yield gpt, "embed_norm"
    if "qk_norm" in inserted:
        for block in gpt.blocks:
            attention: nn.Module = block.attention  # type: ignore[assignment]
            yield from ((attention, name) for name in ("q_norm", "k_norm", "qk_scale"))


class _HiddenParameters:
    """An optimizer without some of its parameters."""

    def __init__(self, optimizer: Optimizer, hidden: set[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self.states: dict[Tensor, Any] = {p: optimizer.state.pop(p) for p in hidden if p in optimizer.state}
        for group, members in self.groups:
            group["params"] = [p for p in members if p not in hidden]
        self.kept = [bool(group["params"]) for group, _ in self.groups]
        optimizer.param_groups[:] = [group for group, _ in self.groups if group["params"]]

    def put_back(self) -> None:
        """Give it its parameters again; a load may have made new groups of those that it saw."""
        loaded = iter(list(self.optimizer.param_groups))
        whole = []
        for (group, members), kept in zip(self.groups, self.kept, strict=True):
            current = next(loaded) if kept else group
            current["params"] = members
            whole.append(current)
        self.optimizer.param_groups[:] = whole
        self.optimizer.state.update(self.states)
