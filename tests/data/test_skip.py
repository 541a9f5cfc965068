from __future__ import annotations

import pytest

from lit_stable.callbacks.positions import merge_ranges, stream_position
from lit_stable.data.skip import new_ranges, parse_steps, steps_to_ranges


def eight_per_step(step: int) -> int:
    return (step - 1) * 8


def test_requests_are_steps_or_inclusive_ranges():
    assert parse_steps(["13251-14000", "7", 9, " 3 - 4 "]) == [(13251, 14000), (7, 7), (9, 9), (3, 4)]


def test_all_malformed_requests_are_told_at_once():
    with pytest.raises(ValueError, match="must be a step or FIRST-LAST") as error:
        parse_steps(["5-4", "0-3", "1-2", "x", "-3"])
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        f"data.skip_steps={request!r}" for request in ("5-4", "0-3", "x", "-3")
    ]


def test_whole_global_batches_leave_the_stream():
    # EN-2 of the 104B chronicles: 750 steps of 2048 samples.
    assert steps_to_ranges([(13251, 14000)], lambda step: (step - 1) * 2048, []) == [(13250 * 2048, 14000 * 2048)]


def test_steps_name_the_data_that_the_run_would_have_read():
    # Steps 3-4 are gone already, so step 3 now reads what was step 5.
    assert steps_to_ranges([(3, 3)], eight_per_step, [(16, 32)]) == [(32, 40)]


def test_a_request_across_an_older_gap_drops_its_full_number_of_batches():
    dropped = [(16, 32)]
    (added,) = steps_to_ranges([(2, 3)], eight_per_step, dropped)  # the data of what were steps 2 and 5
    merged = merge_ranges([*dropped, added])
    assert merged == [(8, 40)]
    assert stream_position(8, merged) == 40


def test_overlapping_requests_count_once():
    ranges = steps_to_ranges([(5, 7), (2, 3), (6, 9)], eight_per_step, [])
    assert merge_ranges(ranges) == [(8, 24), (32, 72)]


def test_a_batch_size_ramp_decides_what_a_step_holds():
    sizes = [4, 4, 8, 8, 16]
    assert steps_to_ranges([(2, 4)], lambda step: sum(sizes[: step - 1]), []) == [(4, 24)]


def test_known_requests_are_not_turned_into_data_again():
    requests = [" 2 - 3", "5", 5, "5-5"]
    assert new_ranges(requests, [], eight_per_step, 0, []) == {"2-3": (8, 24), "5-5": (32, 40)}
    assert new_ranges(requests, ["2-3"], eight_per_step, 24, [(8, 24)]) == {"5-5": (48, 56)}


def test_a_range_that_begins_in_the_past_is_refused():
    with pytest.raises(ValueError, match=r"skip_steps=3-9, 4-4: begins at a step that is committed already; resume"):
        new_ranges(["3-9", "4", "5-6"], [], eight_per_step, 32, [])


def test_the_next_step_may_still_be_dropped():
    assert new_ranges(["5-6"], [], eight_per_step, 32, []) == {"5-6": (32, 48)}
