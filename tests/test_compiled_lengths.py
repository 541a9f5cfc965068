"""A GPT whose blocks are compiled, while its sequences grow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_gpt_run import LENGTH, fit, tiny_module

from lit_stable.callbacks import SequenceLengthWarmup


def warmup() -> SequenceLengthWarmup:
    return SequenceLengthWarmup(min_length=7, total_steps=9, max_length=LENGTH, multiple_of=1)


def test_a_warm_up_of_many_lengths_costs_two_compilations_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Counter[str] = Counter()
    compile = torch.compile

    def counting(function: Any, **options: Any) -> Any:
        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            # Blocks are compiled again, without gradients, for validation: its length is always the full one.
            compiled[f"{function.__name__}, {'training' if torch.is_grad_enabled() else 'validation'}"] += 1
            return graph.forward

        return compile(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", counting)
    torch._dynamo.reset()
    assert len(warmup().lengths.distinct()) == 9  # above the eight after which torch gives up on fixed shapes
    run = fit(steps=9, callbacks=(warmup(),), module=tiny_module(compile="on", position="rope", n_layer=1))
    assert compiled["forward, training"] == compiled["next_token_loss, training"] == 2
    assert max(compiled.values()) <= 3
    plain = fit(steps=9, callbacks=(warmup(),), module=tiny_module(compile="off", position="rope", n_layer=1))
    assert run.rows == plain.rows
