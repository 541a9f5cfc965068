"""The largest logit of every head of every attention module, as a forward pass goes by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attention_logits import AttentionCalls, ShowsQueriesKeys, largest_logits
from .shards import local
from .wrapper_names import unwrapped


class AttentionWatch:
    """Sees every call of ``scaled_dot_product_attention`` and every module that shows its queries and keys.

    A module stands under its name, without what sharding or compiling puts in front of it: the innermost one that was
    being called. One that is called twice in a pass has the larger of both.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []  # names of the modules that are being called, outermost first
        self._shows: set[str] = set()  # of those, which show queries and keys themselves
        self._largest: dict[str, Tensor] = {}

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow which module is being called, and note every attention."""
        self._stack, self._largest = [], {}
        modules = {unwrapped(name): m for name, m in module.named_modules() if name}
        self._shows = {name for name, m in modules.items() if isinstance(m, ShowsQueriesKeys)}
        with ExitStack() as stack:
            for name, m in modules.items():
                for handle in (
                    m.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                    m.register_forward_hook(self._leave, always_call=True),
                ):
                    stack.callback(handle.remove)
            stack.enter_context(AttentionCalls(self._note))
            yield

    def take(self) -> dict[str, Tensor]:
        """What the last pass has shown, by name: (H,) fp32, the heads that this rank holds."""
        taken, self._largest = self._largest, {}
        return taken

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append(name)
        if name in self._shows:
            assert isinstance(module, ShowsQueriesKeys)
            q, k, scale, *mask = module.queries_keys(*args, **kwargs)
            self._keep(name, largest_logits(local(q), local(k), scale, True, *mask))

    def _leave(self, *ignored: Any) -> None:
        self._stack.pop()

    # Tensor-parallel ranks hold whole heads, so that pieces will do.
    def _note(self, q: Tensor, k: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None) -> None:
        if not self._shows.intersection(self._stack):
            name = self._stack[-1] if self._stack else "attention"
            self._keep(name, largest_logits(local(q), local(k), scale, is_causal, mask))

    def _keep(self, name: str, value: Tensor) -> None:
        self._largest[name] = torch.maximum(self._largest[name], value) if name in self._largest else value
