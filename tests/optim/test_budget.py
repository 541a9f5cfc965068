import pytest

from lit_stable.optim.budget import parse_budget


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (0, 0),
        (1800, 1800),
        ("1800", 1800),
        ("126_953_125", 126_953_125),
        ("375M", 375_000_000),
        ("2k", 2_000),
        ("2K", 2_000),
        ("1.5B", 1_500_000_000),
        ("3G", 3_000_000_000),
        ("1.4T", 1_400_000_000_000),
        ("300 B", 300_000_000_000),
        ("3e8", 300_000_000),
        ("1.001B", 1_001_000_000),  # 1.001 * 10**9 is 1000999999.9999999 in binary floating point
        ("0.5k", 500),
    ],
)
def test_a_budget_is_the_number_times_a_decimal_multiple(written, count):
    assert parse_budget(written) == count


@pytest.mark.parametrize(
    "written", ["", "M", "-5", "375m", "375MB", "1,000", "10 k k", "1e-3", "nan", -1, True, "1e999"]
)
def test_what_is_no_number_with_a_known_suffix_is_refused(written):
    with pytest.raises(ValueError, match=r"budget .*: must be a whole number >= 0 with an optional k, M, B, G or T"):
        parse_budget(written)


def test_a_fraction_of_a_unit_is_refused():
    with pytest.raises(ValueError, match=r"budget '1.2345k': must be a whole number, not 1234.5\."):
        parse_budget("1.2345k")
