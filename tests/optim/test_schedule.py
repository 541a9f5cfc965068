import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_stable.callbacks.progress import Mark
from lit_stable.optim.schedule import LRSchedule, format_lr, resolve_conflict

MEGATRON = {"peak": 6e-5, "shape": "cosine", "unit": "samples", "warmup": 216_320}


def significant(lr, digits=5):
    return f"{lr:.{digits - 1}e}"


def test_half_of_the_warmup_gives_half_of_the_peak():
    schedule = LRSchedule(peak=6e-5, warmup=1800, horizon=20_000, floor=6e-6)
    assert schedule.lr(0) == 0.0
    assert schedule.lr(900) == 3e-5
    assert schedule.lr(1800) == 6e-5


@pytest.mark.parametrize(
    ("samples", "floor", "horizon", "expected"),
    [
        (1_519_744, 6e-6, 126_953_125, "5.9986e-05"),
        (1_519_744, 6e-7, 12_695_312, "5.8415e-05"),
        (7_594_208, 6e-6, 126_953_125, "5.9550e-05"),
    ],
)
def test_the_cosine_of_the_104b_chronicle_is_met_to_five_digits(samples, floor, horizon, expected):
    assert significant(LRSchedule(**MEGATRON, floor=floor, horizon=horizon).lr(samples)) == expected


def test_the_cosine_is_half_way_down_in_the_middle_and_at_the_floor_from_the_horizon_on():
    schedule = LRSchedule(peak=1.0, warmup=100, horizon=300, floor=0.2)
    assert schedule.lr(200) == pytest.approx(0.6)
    assert [schedule.lr(n) for n in (300, 301, 10**12)] == [0.2, 0.2, 0.2]


def test_linear_falls_on_a_straight_line():
    schedule = LRSchedule(peak=1.0, shape="linear", warmup=100, horizon=300, floor=0.5)
    assert [schedule.lr(n) for n in (100, 150, 200, 300)] == [1.0, 0.875, 0.75, 0.5]


def test_constant_stays_at_the_peak():
    assert LRSchedule(peak=0.3, shape="constant").lr(0) == 0.3
    assert LRSchedule(peak=0.3, shape="constant", warmup=10).lr(10**15) == 0.3


@pytest.mark.parametrize("cooldown", [20, "20", "0.02k", 0.2, "0.2", ".20"])
def test_wsd_is_flat_until_the_last_cooldown_however_its_length_is_written(cooldown):
    schedule = LRSchedule(peak=1.0, shape="wsd", warmup=10, horizon=100, cooldown=cooldown)
    assert [schedule.lr(n) for n in (5, 10, 80, 85, 90, 100)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.0]


def test_inverse_sqrt_halves_when_progress_quadruples_and_stops_at_the_floor():
    schedule = LRSchedule(peak=1.0, shape="inverse_sqrt", warmup=100, floor=0.1)
    assert [schedule.lr(n) for n in (50, 100, 400, 1600, 10**9)] == [0.5, 1.0, 0.5, 0.25, 0.1]


def test_inverse_sqrt_with_a_horizon_ends_at_the_floor():
    schedule = LRSchedule(peak=1.0, shape="inverse_sqrt", warmup=100, horizon=400)
    assert schedule.lr(399) == pytest.approx(math.sqrt(100 / 399))
    assert schedule.lr(400) == 0.0


@given(
    shape=st.sampled_from(["cosine", "linear", "wsd", "inverse_sqrt"]),
    warmup=st.integers(1, 1000),
    decay=st.integers(2, 10_000),
    floor=st.floats(0, 1),
)
def test_every_shape_rises_to_the_peak_then_never_rises_again(shape, warmup, decay, floor):
    cooldown = 1 + decay // 2 if shape == "wsd" else None
    schedule = LRSchedule(1.0, shape, warmup=warmup, horizon=warmup + decay, floor=floor, cooldown=cooldown)
    rising = [schedule.lr(n) for n in range(warmup + 1)]
    falling = [schedule.lr(n) for n in range(warmup, warmup + decay + 2)]
    assert rising == sorted(rising)
    assert rising[-1] == 1.0
    assert falling == sorted(falling, reverse=True)
    assert min(falling) == falling[-1] == floor


def test_milestones_name_the_points_where_the_rate_turns():
    schedule = LRSchedule(peak=1.0, shape="wsd", warmup=10, horizon=100, cooldown=20, floor=0.5)
    assert schedule.milestones() == [
        (0, 0.0, "start"),
        (10, 1.0, "warm-up ends"),
        (80, 1.0, "cooldown starts"),
        (90, 0.75, "half-way through the decay"),
        (100, 0.5, "decay ends"),
    ]
    assert LRSchedule(peak=1.0, shape="constant").milestones() == [(0, 1.0, "start")]


def test_a_warm_up_in_samples_goes_with_a_decay_in_tokens():
    schedule = LRSchedule(peak=1.0, warmup=100, warmup_unit="samples", horizon=40_000, unit="tokens", floor=0.5)
    assert [schedule.rate(Mark(1, samples, 10 * samples)) for samples in (0, 25, 100)] == [0.0, 0.25, schedule.lr(1000)]
    assert schedule.rate(Mark(9, 400, 20_000)) == pytest.approx(0.75)
    assert schedule.rate(Mark(9, 800, 40_000)) == 0.5
    assert schedule.milestones()[0] == (0, 1.0, "start")
    same = LRSchedule(peak=1.0, warmup=100, warmup_unit="tokens", horizon=40_000, unit="tokens")
    assert not same.mixes_units
    assert (schedule.describe_units(), same.describe_units()) == ("tokens, warm-up 100 samples", "tokens")
    assert same.rate(Mark(1, 5, 50)) == 0.5


def test_seven_digits_tell_a_rate_from_its_neighbour():
    assert format_lr(5.998591234e-05) == "5.998591e-05"
    assert format_lr(6e-5) == "6e-05"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peak": 0.0, "shape": "constant"}, r"schedule.peak=0.0: must be a finite number > 0\."),
        ({"peak": math.nan, "shape": "constant"}, r"schedule.peak=nan: must be a finite number > 0\."),
        ({"floor": 2.0, "horizon": 9}, r"schedule.floor=2.0: must lie between 0 and schedule.peak=1.0\."),
        (
            {"shape": "inverse_sqrt", "warmup": 9, "warmup_unit": "tokens"},
            r"schedule.warmup_unit=tokens: shape inverse_sqrt scales with the warm-up; set it to null or steps",
        ),
        ({"shape": "cosine"}, r"schedule.horizon=null: shape cosine needs the end of its decay in steps"),
        ({"shape": "constant", "horizon": "9k"}, r"schedule.horizon=9k: shape constant never decays; set it to null\."),
        ({"shape": "constant", "floor": 0.1}, r"schedule.floor=0.1: shape constant never decays; set it to 0\."),
        ({"shape": "wsd", "horizon": 9}, r"schedule.cooldown=null: shape wsd needs the length of its final decay"),
        ({"horizon": 9, "cooldown": 3}, r"schedule.cooldown=3: shape cosine has none; set it to null\."),
        ({"shape": "inverse_sqrt"}, r"schedule.warmup=0: shape inverse_sqrt scales with the warm-up"),
        ({"warmup": "9", "horizon": 9}, r"schedule.warmup=9: must be below schedule.horizon=9, which includes it\."),
        ({"shape": "wsd", "warmup": 5, "horizon": 9, "cooldown": 5}, r"schedule.cooldown=5: must .* at most 4\."),
        ({"shape": "wsd", "horizon": 9, "cooldown": 0}, r"schedule.cooldown=0: must be above 0 .* at most 9\."),
        ({"warmup": "0.2", "horizon": 9}, r"schedule.warmup: '0.2': must be a whole number, not 0.2\."),
    ],
)
def test_a_wrong_field_is_refused_with_its_value_and_the_rule(settings, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule(**{"peak": 1.0, **settings})


def test_all_problems_come_in_one_message():
    with pytest.raises(ValueError, match="peak") as caught:
        LRSchedule(peak=-1.0, shape="linear", warmup="many", cooldown=0.1)
    fields = [line.split("=")[0].split(":")[0] for line in str(caught.value).splitlines()]
    assert fields == ["schedule.peak", "schedule.horizon", "schedule.cooldown", "schedule.warmup"]


def test_another_spelling_of_a_length_is_no_difference():
    ours = LRSchedule(peak=1.0, unit="tokens", warmup="375M", horizon="300B", on_conflict="override")
    assert ours.differences(LRSchedule(peak=1.0, unit="tokens", warmup=375_000_000, horizon="0.3T")) == []
    other = LRSchedule(peak=0.5, unit="tokens", warmup="375M", horizon="200B")
    assert ours.differences(other) == [("peak", 1.0, 0.5), ("horizon", "300B", "200B")]


def test_an_equal_schedule_resumes_under_every_policy():
    for policy in ("error", "override", "checkpoint"):
        current = LRSchedule(peak=6e-5, horizon=100, on_conflict=policy)
        assert resolve_conflict(current, asdict(LRSchedule(peak=6e-5, horizon=100))) == (current, [])


def test_a_changed_schedule_is_refused_by_default_with_both_values_and_the_remedy():
    stored = asdict(LRSchedule(peak=6e-5, horizon=100))
    with pytest.raises(
        ValueError, match=r"another schedule \(schedule.peak 6e-05 in the checkpoint but 4e-05 in the recipe\): add"
    ) as caught:
        resolve_conflict(LRSchedule(peak=4e-5, horizon=100), stored)
    assert "`--model.schedule.on_conflict override`" in str(caught.value)
    assert "`--model.schedule.on_conflict checkpoint`" in str(caught.value)


def test_override_follows_the_recipe_and_lists_old_to_new():
    current = LRSchedule(peak=4e-5, horizon=200, on_conflict="override")
    chosen, lines = resolve_conflict(current, asdict(LRSchedule(peak=6e-5, horizon=100)))
    assert chosen == current
    assert lines == ["schedule.peak: 6e-05 -> 4e-05", "schedule.horizon: 100 -> 200"]


def test_checkpoint_follows_the_checkpoint_and_lists_what_the_recipe_loses():
    current = LRSchedule(peak=4e-5, horizon=100, on_conflict="checkpoint")
    chosen, lines = resolve_conflict(current, asdict(LRSchedule(peak=6e-5, horizon=100)))
    assert chosen == LRSchedule(peak=6e-5, horizon=100, on_conflict="checkpoint")
    assert lines == ["schedule.peak: 4e-05 -> 6e-05"]


def test_a_checkpoint_without_a_field_was_trained_with_its_default():
    stored = asdict(LRSchedule(peak=6e-5, horizon=100))
    del stored["cooldown"]
    assert resolve_conflict(LRSchedule(peak=6e-5, horizon=100), stored)[1] == []
