from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import AccumulationWindows, Progress, StepSeed


def draws(steps: int, seed: int = 1, resume: Path | None = None, save: Path | None = None) -> list[tuple[float, ...]]:
    """What the three generators give in each forward pass of a fit with windows of two micro-batches."""
    rows: list[tuple[float, ...]] = []

    def draw(*rest: Any) -> None:
        rows.append((torch.rand(()).item(), random.random(), float(numpy.random.rand())))

    trainer = quiet_trainer(
        StepSeed(seed), AccumulationWindows(4, 2), Watch("on_before_backward", draw), max_steps=steps
    )
    trainer.fit(TinyModule(), TinyData(), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return rows


def test_every_micro_batch_draws_other_numbers_from_all_three_generators() -> None:
    rows = draws(steps=4)
    assert len(rows) == 8
    for generator in zip(*rows, strict=True):
        assert len(set(generator)) == 8


def test_numbers_are_a_function_of_seed_and_position_alone() -> None:
    torch.manual_seed(5)
    first = draws(steps=2)
    torch.manual_seed(6)
    assert draws(steps=2) == first
    assert draws(steps=2, seed=2) != first


def test_a_resume_draws_what_the_straight_run_drew(tmp_path: Path) -> None:
    straight = draws(steps=4)
    before = draws(steps=2, save=tmp_path / "a.ckpt")
    assert before + draws(steps=4, resume=tmp_path / "a.ckpt") == straight


def test_a_single_step_can_be_replayed_alone() -> None:
    straight = draws(steps=3)
    replayed: list[float] = []
    progress = Progress()
    progress.samples = 8  # after two steps of four samples
    trainer = quiet_trainer(
        progress,
        StepSeed(1),
        AccumulationWindows(4, 2),
        Watch("on_before_backward", lambda *rest: replayed.append(torch.rand(()).item())),
        max_steps=1,
    )
    trainer.fit(TinyModule(), TinyData())
    assert replayed == [row[0] for row in straight[4:]]
