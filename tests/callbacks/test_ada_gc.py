from __future__ import annotations

import math
import random

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_stable.callbacks.ada_gc import AdaGC, RunningNorms

NAMES = ["a", "b", "c"]


def begun(**options: float) -> RunningNorms:
    statistics = RunningNorms(AdaGC(**options))  # type: ignore[arg-type]
    statistics.begin(NAMES, torch.device("cpu"))
    return statistics


def judge(statistics: RunningNorms, *norms: float) -> tuple[list[float], list[float]]:
    given = torch.tensor(norms)
    total = given.norm()
    limits, levels = statistics.judge(given, total, torch.isfinite(total))
    return torch.minimum(given, limits).tolist(), levels.tolist()


def paper(rows: list[list[float]], options: AdaGC) -> tuple[list[list[float]], list[float]]:
    """Algorithm 1, with numbers: (norms after clipping by step, running norms)."""
    running = [math.inf] * len(rows[0])
    clipped = []
    for step, row in enumerate(rows):
        if step < options.warmup_steps:
            factor = min(options.warmup_max_norm / math.hypot(*row), 1.0)
            kept = [factor * norm for norm in row]
            running = [min(old, norm) for old, norm in zip(running, kept, strict=True)]
        else:
            kept = [min(norm, options.rel_threshold * old) for norm, old in zip(row, running, strict=True)]
            running = [
                options.decay * old + (1 - options.decay) * norm for old, norm in zip(running, kept, strict=True)
            ]
        clipped.append(kept)
    return clipped, running


def test_equals_the_papers_algorithm() -> None:
    draw = random.Random(0)
    rows = [[draw.lognormvariate(mu, 0.5) for mu in (-3.0, 0.0, 1.0)] for _ in range(60)]
    options = AdaGC(warmup_steps=20)
    statistics = begun(warmup_steps=20)
    kept = [judge(statistics, *row)[0] for row in rows]
    expected, running = paper(rows, options)
    torch.testing.assert_close(torch.tensor(kept), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(statistics.values[1], torch.tensor(running), rtol=1e-5, atol=0)


def test_the_level_is_that_of_the_global_norm_while_warming_up_and_relative_after() -> None:
    statistics = begun(warmup_steps=1, rel_threshold=2.0, warmup_max_norm=3.0)
    assert judge(statistics, 0.1, 0.2, 0.4)[1] == [3.0] * 3
    assert judge(statistics, 0.1, 0.2, 0.4)[1] == pytest.approx([0.2, 0.4, 0.8])


def test_one_part_that_spikes_is_clipped_alone_and_enters_at_its_limit() -> None:
    statistics = begun(warmup_steps=1)
    judge(statistics, 0.1, 0.2, 0.4)
    kept, _ = judge(statistics, 0.1, 50.0, 0.4)
    assert kept == pytest.approx([0.1, 0.21, 0.4])
    assert statistics.values[1].tolist() == pytest.approx([0.1, 0.98 * 0.2 + 0.02 * 0.21, 0.4])


def test_the_running_norm_rises_by_a_thousandth_per_step_at_most() -> None:
    statistics = begun(warmup_steps=1)
    judge(statistics, 0.1, 0.2, 0.4)
    for _ in range(10):
        judge(statistics, 9.0, 9.0, 9.0)
    assert statistics.values[1, 0].item() == pytest.approx(0.1 * 1.001**10, rel=1e-5)


def test_a_part_without_a_gradient_is_not_shut_for_ever() -> None:
    statistics = begun(warmup_steps=2)
    judge(statistics, 0.0, 0.2, 0.4)
    for _ in range(3):
        judge(statistics, 0.1, 0.2, 0.0)
    assert statistics.values[0].tolist() == [2.0, 2.0, 1.0]  # each warms up by norms of its own
    assert judge(statistics, 0.1, 0.2, 0.4)[0] == pytest.approx([0.1, 0.2, 0.4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rel_threshold": 0.9}, r"`AdaGC\(rel_threshold=0.9\)`: must be a finite number, 1 or more"),
        ({"rel_threshold": math.nan}, r"`AdaGC\(rel_threshold=nan\)`"),
        ({"decay": 1.0}, r"`AdaGC\(decay=1.0\)`: must lie between 0 and 1"),
        ({"warmup_steps": 0}, r"`AdaGC\(warmup_steps=0\)`: must be at least 1"),
        ({"warmup_max_norm": 0.0}, r"`AdaGC\(warmup_max_norm=0.0\)`: must be a finite number > 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AdaGC(**options)  # type: ignore[arg-type]
