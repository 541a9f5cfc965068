from __future__ import annotations

import math

import pytest

from lit_stable.callbacks.length_schedule import LengthSchedule, LengthStages


def tr8b() -> LengthSchedule:
    return LengthSchedule("linear", shortest=64, longest=2048, total=36_000, multiple_of=8)


def test_the_lengths_of_tr8b() -> None:
    lengths = tr8b()
    golden = {145: 64, 146: 72, 1831: 160, 15_000: 888, 18_000: 1056, 36_000: 2048}
    assert {step: lengths.at(step) for step in golden} == golden
    switches = [step for step in range(2, 800) if lengths.at(step) != lengths.at(step - 1)]
    assert switches == [146, 291, 436, 581, 726]


def test_the_tokens_of_tr8b_and_its_248_switches() -> None:
    lengths = tr8b()
    tokens = 0
    so_far = {}
    for step in range(1, 36_001):
        tokens += 2048 * lengths.at(step)
        so_far[step] = tokens
    assert [round(so_far[step] / 1e9, 1) for step in (15_000, 18_000, 36_000)] == [14.5, 20.5, 77.6]
    assert len(lengths.distinct()) == 249


def test_integers_equal_the_formula_in_floating_point() -> None:
    linear, root = tr8b(), LengthSchedule("root", shortest=64, longest=2048, total=36_000, multiple_of=8)
    for step in range(1, 36_000, 7):
        part = step / 36_000
        assert linear.at(step) == int(64 + part * 1984) // 8 * 8
        assert root.at(step) == int(64 + math.sqrt(part) * 1984) // 8 * 8


def test_the_root_is_long_sooner_and_ends_at_the_same_step() -> None:
    root = LengthSchedule("root", shortest=10, longest=110, total=100)
    assert [root.at(step) for step in (1, 25, 49, 99, 100, 101)] == [20, 60, 80, 109, 110, 110]


def test_the_full_length_need_be_no_multiple() -> None:
    lengths = LengthSchedule("linear", shortest=8, longest=30, total=4, multiple_of=8)
    assert [lengths.at(step) for step in (1, 2, 3, 4, 5)] == [8, 16, 24, 30, 30]


def test_stages_change_after_their_last_step() -> None:
    for text in ("4 for 2 steps then 8 for 1 steps then 16", "4 for 2 steps then 8 for 1 steps"):
        stages = LengthStages(text, longest=16)
        assert [stages.at(step) for step in range(1, 7)] == [4, 4, 8, 16, 16, 16]
        assert stages.distinct() == [4, 8, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cubic", 64, 2048, 10, 8), r"shape='cubic': must be one of linear, root"),
        (("linear", 0, 2048, 10, 8), r"min_length=0: must be at least 1"),
        (("linear", 64, 2048, 0, 8), r"total_steps=0: must be at least 1"),
        (("linear", 64, 2048, 10, 0), r"multiple_of=0: must be at least 1"),
        (("linear", 64, 64, 10, 8), r"min_length=64: must be below the full length 64"),
        (("root", 60, 2048, 10, 8), r"min_length=60: .* multiple_of=8; nearest legal values are 56 and 64\."),
        (("root", 5, 2048, 10, 8), r"min_length=5: .*; nearest legal values are 8\."),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(arguments: tuple[str, int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthSchedule(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4 for 2 samples", r"2 samples: stages of a length are counted in steps"),
        ("32 for 2 steps", r"stage 32: must be at most the full length 16"),
        ("4 for 2 steps then 8", r"ends at 8: must end at the full length 16"),
        ("quadratic", r"'quadratic': must be a whole number"),
    ],
)
def test_stages_that_do_not_lead_to_the_full_length_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthStages(text, longest=16)
