from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tiny_fit import assert_same_bits

from lit_stable.callbacks.spike_arguments import spike_rules
from lit_stable.callbacks.spike_detector import CAUSES, AcceptedWindow, SpikeDetector, SpikeRule, Verdict

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def detector(window: int = 8, max_skips: int = 5, at_cap: Any = "accept", **rule: Any) -> SpikeDetector:
    return SpikeDetector({"norm": SpikeRule(**rule)}, window, max_skips, at_cap)


def observe(judge: SpikeDetector, value: float, **options: Any) -> Verdict:
    return judge.observe({"norm": torch.tensor(value)}, **options)


def skips(judge: SpikeDetector, values: Iterable[float]) -> list[bool]:
    return [bool(observe(judge, value).skip) for value in values]


def cause(verdict: Verdict) -> str:
    return CAUSES[int(verdict.judgement.cause)]


@pytest.mark.parametrize("count", [1, 2, 5, 8, 11])
def test_median_and_spread_are_those_of_the_last_accepted_values(count: int) -> None:
    values = [float((7 * i) % 11) + 0.5 for i in range(count)]
    judge = detector(z_score=3.0)
    for value in values:
        judge.windows["norm"].admit(torch.tensor(value), TRUE, FALSE)
    kept = values[-8:]
    median = statistics.median(kept)
    mad = statistics.median(abs(v - median) for v in kept)
    limit = judge.windows["norm"].judge(torch.tensor(1.0), judge.rules["norm"]).limit
    assert limit.item() == pytest.approx(median + 3.0 * 1.4826 * mad, rel=1e-6)


def test_the_spread_has_a_floor_relative_to_the_median() -> None:
    judge = detector(z_score=4.0, min_spread=0.25)
    skips(judge, [2.0] * 8)
    # 2 + 4 * 0.25 * 2
    assert observe(judge, 1.0).judgement.limit.item() == 4.0
    assert skips(judge, [4.0, 4.01]) == [False, True]


@pytest.mark.parametrize("value", [3.0 + 1e-4, 3.0 * 1.0000001])
def test_a_constant_history_condemns_no_harmless_step(value: float) -> None:
    judge = SpikeDetector(spike_rules(None, 16.0, None, "both", 4), 8, 5, "accept")
    for _ in range(8):
        judge.observe({"grad_norm": torch.tensor(3.0), "loss": torch.tensor(3.0)})
    assert not judge.observe({"grad_norm": torch.tensor(value), "loss": torch.tensor(value)}).skip


def test_the_ratio_is_to_the_exponential_mean_of_the_accepted_values() -> None:
    judge = detector(window=3, ratio=2.0)  # span 3: each new value weighs 1/2
    assert skips(judge, [1.0, 2.0]) == [False, False]
    assert observe(judge, 3.1).judgement.limit.item() == 3.0  # 2 * 1.5
    assert cause(observe(judge, 3.1)) == "ratio"
    assert judge.windows["norm"].running.item() == 1.5


def test_the_absolute_threshold_holds_from_the_first_step_and_the_others_after_warm_up() -> None:
    judge = detector(threshold=10.0, z_score=2.0, ratio=2.0, warmup_steps=3)
    assert skips(judge, [1.0, 11.0, 9.0, 1.0, 9.9]) == [False, True, False, False, True]


def test_of_several_triggers_the_smallest_limit_is_told_and_the_absolute_cause_wins() -> None:
    judge = detector(threshold=3.0, ratio=2.0)
    observe(judge, 1.0)
    verdict = observe(judge, 4.0)
    assert (cause(verdict), verdict.judgement.limit.item(), verdict.judgement.score.item()) == ("threshold", 2.0, 2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 50.0], ids=str)
def test_what_is_skipped_never_enters_the_statistics(bad: float) -> None:
    judge, twin = (detector(z_score=6.0, ratio=5.0, min_spread=0.1) for _ in range(2))
    skips(judge, [1.0, 1.1, bad, 0.9, bad])
    skips(twin, [1.0, 1.1, 0.9])
    assert_same_bits(judge.windows["norm"].state_dict(), twin.windows["norm"].state_dict())
    assert (cause(observe(judge, bad)) == "non_finite") is not math.isfinite(bad)


def test_one_nan_among_hundreds_of_normal_steps_costs_one_skip_and_blinds_nothing() -> None:
    judge = detector(window=128, z_score=6.0, min_spread=0.1, warmup_steps=20)
    values = [1.0 + 0.01 * (i % 7) for i in range(250)]
    values[50] = math.nan
    values.append(50.0)
    assert [i for i, skip in enumerate(skips(judge, values)) if skip] == [50, 250]


def test_a_large_spike_does_not_hide_a_smaller_one_behind_it() -> None:
    judge = detector(window=128, z_score=6.0, min_spread=0.1, warmup_steps=20)
    assert skips(judge, [*[1.0] * 60, 50.0, 25.0, 1.0])[-3:] == [True, True, False]


def test_a_shift_of_level_costs_max_skips_steps_and_is_then_the_new_normal() -> None:
    judge = detector(window=128, z_score=6.0, min_spread=0.1, warmup_steps=20, max_skips=5)
    found = skips(judge, [1.0] * 128 + [10.0] * 200)
    assert [i for i, skip in enumerate(found) if skip] == list(range(128, 133))
    assert judge.windows["norm"].running.item() == 10.0  # nothing is left of the old level


def test_the_value_accepted_at_the_cap_is_an_event_that_was_not_skipped() -> None:
    judge = detector(z_score=6.0, min_spread=0.1, max_skips=2)
    skips(judge, [1.0, 10.0, 10.0])
    verdict = observe(judge, 10.0)
    assert (bool(verdict.skip), bool(verdict.stop), cause(verdict)) == (False, False, "z_score")


def test_at_cap_stop_skips_on_and_asks_for_the_stop() -> None:
    judge = detector(threshold=2.0, max_skips=2, at_cap="stop")
    verdicts = [observe(judge, v) for v in (3.0, 3.0, 1.0, 3.0, 3.0, 3.0, 3.0)]
    assert [bool(v.skip) for v in verdicts] == [True, True, False, True, True, True, True]
    assert [bool(v.stop) for v in verdicts] == [False] * 5 + [True, True]


def test_the_cap_never_accepts_what_is_not_finite() -> None:
    judge = detector(threshold=2.0, max_skips=2, at_cap="accept")
    verdicts = [observe(judge, v) for v in (3.0, 3.0, math.nan)]
    assert (bool(verdicts[-1].skip), bool(verdicts[-1].stop)) == (True, True)
    assert not observe(judge, 3.0).skip  # finite again, and still at the cap: the new normal


def test_an_overflow_under_a_loss_scale_is_apart_from_spikes_until_the_scale_can_fall_no_further() -> None:
    judge = detector(threshold=2.0, max_skips=2)
    high, low = torch.tensor(8.0), torch.tensor(1.0)
    verdicts = [observe(judge, math.inf, loss_scale=high) for _ in range(9)]
    assert {(bool(v.skip), bool(v.stop), cause(v)) for v in verdicts} == {(True, False, "overflow")}
    verdicts = [observe(judge, math.inf, loss_scale=low) for _ in range(3)]
    assert [(bool(v.skip), bool(v.stop), cause(v)) for v in verdicts] == [(True, s, "non_finite") for s in (0, 0, 1)]


def test_an_overflow_between_spikes_does_not_end_their_row() -> None:
    judge = detector(threshold=2.0, max_skips=2, at_cap="stop")
    observe(judge, 3.0)
    observe(judge, math.inf, loss_scale=torch.tensor(8.0))
    observe(judge, 3.0)
    assert observe(judge, 3.0).stop


def test_a_norm_of_zero_tells_nothing() -> None:
    judge = detector(z_score=6.0, min_spread=0.5, warmup_steps=2)
    assert skips(judge, [0.0] * 20 + [1.0] * 20) == [False] * 40


def test_a_step_is_judged_by_the_signal_that_is_furthest_above_its_limit() -> None:
    rule = SpikeRule(ratio=2.0)
    judge = SpikeDetector({"a": rule, "b": rule}, 8, 5, "accept")
    judge.observe({"a": torch.tensor(1.0), "b": torch.tensor(10.0)})
    for values, expected in (((3.0, 10.0), (True, 0, 2.0)), ((3.0, 80.0), (True, 1, 20.0)), ((1.0, 10.0), (False,))):
        verdict = judge.observe(dict(zip("ab", map(torch.tensor, values), strict=True)))
        told = (bool(verdict.skip), int(verdict.judgement.signal), verdict.judgement.limit.item())
        assert told[: len(expected)] == expected
    # What was fine in one signal is not taken in when the other made the step a spike.
    assert judge.windows["a"].state_dict()["values"] == [1.0, 1.0]


@pytest.mark.parametrize("count", [0, 3, 8, 13])
def test_a_window_goes_on_from_its_state_as_if_never_saved(count: int) -> None:
    judge = detector(z_score=3.0, ratio=4.0, min_spread=0.05, warmup_steps=2)
    values = [1.0 + ((13 * i) % 7) / 10 for i in range(count)]
    skips(judge, values)
    twin = detector(z_score=3.0, ratio=4.0, min_spread=0.05, warmup_steps=2)
    twin.load_state_dict(judge.state_dict())
    assert_same_bits(twin.state_dict(), judge.state_dict())
    for value in (1.0, 9.0, 1.3, math.nan, 1.7, 0.2, 30.0, *values):
        left, right = observe(judge, value), observe(twin, value)
        assert_same_bits([left.skip, *left.judgement], [right.skip, *right.judgement])
    assert_same_bits(twin.state_dict(), judge.state_dict())


def test_of_a_longer_window_the_newest_values_are_kept() -> None:
    window = AcceptedWindow(2)
    window.load_state_dict({"values": [1.0, 2.0, 3.0], "running": 2.0})
    assert window.state_dict() == {"values": [2.0, 3.0], "running": 2.0}


def test_a_signal_that_the_state_lacks_begins_anew() -> None:
    judge = SpikeDetector(spike_rules(None, 6.0, None, "both", 2), 8, 5, "accept")
    judge.load_state_dict({"consecutive": 2, "windows": {"grad_norm": {"values": [1.0], "running": 1.0}}})
    assert judge.state_dict()["windows"]["loss"] == {"values": [], "running": 0.0}
    assert judge.state_dict()["consecutive"] == 2


# -- the defaults on healthy runs --------------------------------------------------------------------------------------


def default_skips(values: Iterable[float], signal: str) -> list[int]:
    """Steps, counted from 1, that ``GradSpikeSkip(signal=...)`` would skip."""
    judge = SpikeDetector(spike_rules(None, 16.0, None, signal, 64), 128, 5, "accept")
    found = []
    for step, value in enumerate(values, start=1):
        given = {"grad_norm": torch.tensor(value if signal == "grad_norm" else 1.0), "loss": torch.tensor(value)}
        if judge.observe(given).skip:
            found.append(step)
    return found


def healthy(kind: str, steps: int) -> list[float]:
    """Gradient norms of runs that are well: falling in warm-up, a slow bulge, and noise with heavy tails."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(steps, generator=generator)
    if kind == "log-normal":
        noise = (0.4 * normal).exp()
    elif kind == "student":  # 3 degrees of freedom
        noise = 1 + 0.1 * (normal / torch.randn(3, steps, generator=generator).square().mean(0).sqrt()).abs()
    else:  # one step in a hundred twice as large
        noise = (0.15 * normal).exp() * (1 + (torch.rand(steps, generator=generator) < 0.01).float())
    step = torch.arange(steps)
    level = 0.5 + 4.5 * (-step / 120).exp() + 0.3 * (-(((step - 3000) / 800) ** 2)).exp()
    return [float(v) for v in level * noise]


@pytest.mark.parametrize("kind", ["log-normal", "student", "bursts"])
def test_the_defaults_skip_nothing_in_five_thousand_healthy_steps(kind: str) -> None:
    values = healthy(kind, 5_000)
    assert max(values[200:]) > 1.8 * statistics.median(values[200:]), "the tail is heavy"
    assert default_skips(values, "grad_norm") == []
