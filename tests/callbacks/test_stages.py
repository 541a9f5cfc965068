from __future__ import annotations

import pytest

from lit_stable.callbacks.stages import StageLength, parse_count, parse_stages, stages_from_list


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (7, 7),
        ("1800", 1800),
        ("6_000_000", 6_000_000),
        ("1.5k", 1500),
        ("2K", 2000),
        ("375M", 375 * 10**6),
        ("375 M", 375 * 10**6),
        ("168B", 168 * 10**9),
        ("3G", 3 * 10**9),
        ("1.4T", 1_400 * 10**9),
        ("3e8", 3 * 10**8),
        ("1.001B", 1_001_000_000),  # 1.001 * 10**9 is 1000999999.9999999 in binary floating point
    ],
)
def test_counts_are_decimal(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["six", "", "M", "-3", "6m", "375MB", "1,000", "10 k k", "1e-3", "nan", -1, True, "1e999"]
)
def test_what_is_no_number_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"must be a whole number >= 0 with an optional k, M, B or T, as in 6M"):
        parse_count(text)


@pytest.mark.parametrize(("text", "number"), [("1.5", "1.5"), ("1.2345k", "1234.5")])
def test_a_fraction_of_a_unit_is_refused(text: str, number: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{text}': must be a whole number, not {number}\.$"):
        parse_count(text)


def test_stages_in_every_unit() -> None:
    assert parse_stages(" 1 for 2 steps then 3 for 4k samples  then 5 for 6 M tokens then 7") == [
        StageLength(1, 2, "steps"),
        StageLength(3, 4000, "samples"),
        StageLength(5, 6_000_000, "tokens"),
        StageLength(7),
    ]


def test_a_list_reads_as_the_text_does() -> None:
    entries: list[dict[str, int | str]] = [{"batch": 1024, "steps": "7.2k"}, {"batch": 2048}]
    assert stages_from_list("batch", entries) == parse_stages("1024 for 7200 steps then 2048")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16 until 3 steps", r"'16 until 3 steps': must read VALUE for LENGTH steps"),
        ("16 then 32", r"stage 16: has no length and another one follows"),
        ("16 for 3 epochs then 32", r"'epochs': must be one of steps, samples, tokens"),
        ("0 for 3 steps then 32", r"'0': must be at least 1"),
        ("16 for 0 steps then 32", r"'0': must be at least 1"),
        ("", r"'': must read VALUE"),
    ],
)
def test_text_that_is_no_list_of_stages_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_stages(text)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"batch": 16, "epochs": 3}, {"batch": 32}], r"must have the key batch and at most one of steps, samples"),
        ([{"size": 16, "steps": 3}], r"must have the key batch"),
        ([{"batch": 16, "steps": 3, "samples": 4}], r"at most one of"),
        ([], r"no stages: give at least one"),
    ],
)
def test_entries_with_other_keys_are_refused(entries: list[dict[str, int | str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stages_from_list("batch", entries)
