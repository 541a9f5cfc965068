"""A compiled GPT while its sequences grow."""

from __future__ import annotations

import pytest
from compilation_counts import count_compilations, stand_in
from tiny_gpt_run import LENGTH, fit, tiny_module

from lit_stable.callbacks import SequenceLengthWarmup


def warmup() -> SequenceLengthWarmup:
    return SequenceLengthWarmup(min_length=7, total_steps=9, max_length=LENGTH, multiple_of=1)


def test_a_warm_up_of_many_lengths_costs_at_most_three_compilations_of_each_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = count_compilations(monkeypatch, stand_in)
    assert len(warmup().lengths.distinct()) == 9  # above the eight after which torch gives up on fixed shapes
    run = fit(steps=9, callbacks=(warmup(),), module=tiny_module(compile="on", position="rope"))
    assert compiled.keys() == {"residual", "forward", "sample_losses"}  # forward: of the last norm
    assert all(1 <= count <= 3 for count in compiled.values()), compiled
    plain = fit(steps=9, callbacks=(warmup(),), module=tiny_module(compile="off", position="rope"))
    assert run.rows == plain.rows
