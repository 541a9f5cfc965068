"""What torch's compiler does on a CUDA device when sequences grow: the stand-in of the CPU tests, replaced by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compilation_counts import count_compilations, inductor
from tiny_gpt_run import NumberedData, fit, tiny_module

from lit_stable.callbacks import SequenceLengthWarmup
from lit_stable.callbacks.private_names import compiled_graphs

pytestmark = pytest.mark.gpu

LONGEST, STEPS = 80, 11


def fit_growing(compile: str, accelerator: str, precision: str) -> Any:
    """Lengths 8, 16, ... 80, one for each step, then one more step at the full length."""
    warmup = SequenceLengthWarmup(min_length=8, total_steps=10, max_length=LONGEST, multiple_of=8)
    assert warmup.lengths.distinct() == list(range(8, LONGEST + 1, 8))  # more than torch compiles fixed shapes for
    module = tiny_module(compile=compile, position="rope", max_length=LONGEST)
    options = {"accelerator": accelerator, "precision": precision, "validates": False}
    return fit(steps=STEPS, callbacks=(warmup,), module=module, data=NumberedData(LONGEST), **options)


def check_compilations(monkeypatch: pytest.MonkeyPatch, accelerator: str, precision: str) -> None:
    plain = fit_growing("off", accelerator, precision)
    compiled, before = count_compilations(monkeypatch, inductor), compiled_graphs()
    run = fit_growing("on", accelerator, precision)
    elsewhere = {"sample_losses"} if accelerator == "cpu" else {"enter"}
    assert compiled.keys() == {"residual", "forward"} | elsewhere  # forward: of the last norm
    assert all(1 <= count <= 3 for count in compiled.values()), compiled
    assert compiled_graphs() - before == compiled.total(), "something else was compiled too"
    losses = [torch.tensor([row[1] for row in fitted.rows]) for fitted in (run, plain)]
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.05)


def test_a_whole_warm_up_costs_at_most_three_compilations_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compilations(monkeypatch, "gpu", "bf16-mixed")
