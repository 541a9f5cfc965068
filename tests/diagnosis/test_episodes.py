from __future__ import annotations

import math
from pathlib import Path

import pytest
from series import TRACES, noisy

from lit_stable.diagnosis.episodes import episodes, events
from lit_stable.diagnosis.log_page import diagnose
from lit_stable.diagnosis.scalars import Scalars, read_scalars


def test_the_recorded_run_recovers_from_its_spike_and_not_from_its_divergence() -> None:
    scalars = read_scalars(TRACES / "llama60m_lr4e-3_dies.csv")
    spike, divergence = episodes(scalars, events(scalars))
    assert (spike.event.step, spike.event.kind, spike.well) == (605, "spike", 604)
    assert spike.recovered is not None
    assert 1000 < spike.recovered < 1300
    assert (divergence.event.step, divergence.recovered, divergence.well) == (1833, None, 1217)


def test_nothing_is_found_in_the_recorded_healthy_run() -> None:
    assert events(read_scalars(TRACES / "llama60m_lr1e-3_healthy.csv")) == []


def scalars_of(values: list[float], every: int) -> Scalars:
    return Scalars([(n * every, {"loss": v}) for n, v in enumerate(values, 1)], {"loss": "loss"})


@pytest.mark.parametrize("every", [1, 10])
def test_a_log_of_every_tenth_step_shows_the_same(every: int) -> None:
    drifting = [v + 0.001 * every * max(0, n - 150) for n, v in enumerate(noisy(800))]
    (episode,) = episodes(scalars_of(drifting, every), events(scalars_of(drifting, every)))
    assert episode.event.kind == "slow_divergence"
    assert episode.well is not None
    assert episode.well < 350 * every


def test_not_finite_to_the_end_has_no_recovery() -> None:
    values = [*noisy(300), *[math.nan] * 100]
    (episode,) = episodes(scalars_of(values, 1), events(scalars_of(values, 1)))
    assert (episode.event.kind, episode.well, episode.recovered) == ("not_finite", 300, None)


def test_a_log_that_begins_with_nan_has_no_good_step_to_go_back_to(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n" + "".join(f"{step},nan\n" for step in range(50)))
    page = diagnose(path)
    assert "last good step: none in this log\n" in page
    assert "no step before it was good; begin anew: lit-stable fit --config RECIPE --config stability/" in page
    assert "CHECKPOINT_AT" not in page
