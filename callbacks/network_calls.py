"""The calls that a training step makes of its network, kept to be made again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class NetworkCalls:
    """Keeps the arguments with which the direct children of a LightningModule are called, without their graph.

    A child that is called from inside of another is no call of its own, and one without parameters is none.

    Attributes:
        made: (module, positional, keyword arguments) of each call, in order.
    """

    def __init__(self) -> None:
        self.made: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._handles: list[Any] = []
        self._depth = 0

    def listen(self, module: nn.Module) -> None:
        """Keep the calls that follow."""
        self._depth = 0
        for child in module.children():
            if next(child.parameters(), None) is None:  # a loss or a metric
                continue
            self._handles += [
                child.register_forward_pre_hook(self._enter, with_kwargs=True),
                child.register_forward_hook(self._leave, always_call=True),
            ]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            self.made.append((module, detached(args), detached(kwargs)))
        self._depth += 1

    def _leave(self, *ignored: Any) -> None:
        self._depth -= 1

    def silence(self) -> None:
        """Keep no further calls: what is recomputed in a backward pass is none."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def release(self) -> None:
        """Forget all."""
        self.silence()
        self.made = []


def detached(value: Any) -> Any:
    """The same, without the graph that leads to it."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(detached(one) for one in value)
    if type(value) is dict:
        return {key: detached(one) for key, one in value.items()}
    return value
