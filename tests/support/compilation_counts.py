"""How often each compiled function is compiled."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Any]


def stand_in(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Runs the graph as it was traced: nothing is compiled, and how often it would be is the same."""
    return graph.forward


def inductor(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """torch's own compiler."""
    return torch._dynamo.lookup_backend("inductor")(graph, inputs)


def count_compilations(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> Counter[str]:
    """Compile by ``backend`` from here on; the count, by the function's name, of what training needs."""
    compiled: Counter[str] = Counter()
    compile = torch.compile

    @functools.cache  # blocks share what is compiled only if they share the backend
    def counted(part: str) -> Backend:
        def count_and_compile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            compiled[part] += torch.is_grad_enabled()  # not what validation, at its one length, needs
            return backend(graph, inputs)

        return count_and_compile

    def compile_counted(function: Any, dynamic: bool | None = None, options: Any = None) -> Any:
        return compile(function, backend=counted(function.__name__), dynamic=dynamic)  # options are inductor's

    monkeypatch.setattr(torch, "compile", compile_counted)
    torch._dynamo.reset()
    return compiled
