"""How stability features of other trainers were seen to fail, and the tests that hold ours against it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SKIP, DETECTOR, OVERRIDE = "test_grad_spike_skip.py", "test_spike_detector.py", "test_lr_override.py"
#: What went wrong, and where it is tried: file, function.
FAILURES: dict[str, list[tuple[str, str]]] = {
    "a skipped step moves weights or moments where gradients are NaN or infinite": [
        (SKIP, "a_skip_leaves_weights_moments_and_step_counts_bit_identical"),
    ],
    "one NaN skips every step after it, or ends clipping": [
        (DETECTOR, "one_nan_among_hundreds_of_normal_steps_costs_one_skip_and_blinds_nothing"),
        (DETECTOR, "what_is_skipped_never_enters_the_statistics"),
        ("test_grad_clip.py", "one_bad_step_neither_skips_its_followers_nor_stops_the_clipping"),
        ("test_z_clip.py", "a_spike_after_a_spike_and_after_a_nan_is_still_caught"),
    ],
    "a large spike hides the next": [
        (DETECTOR, "a_large_spike_does_not_hide_a_smaller_one_behind_it"),
        (DETECTOR, "what_is_skipped_never_enters_the_statistics"),
    ],
    "a history without spread condemns any rise": [
        (DETECTOR, "a_constant_history_condemns_no_harmless_step"),
        ("test_z_clip.py", "a_flat_history_does_not_make_a_small_rise_an_outlier"),
    ],
    "statistics are not saved, or a load of them fails": [
        (SKIP, "resumes_bit_for_bit_around_its_skips"),
        ("test_grad_clip.py", "adaptive_and_scheduled_clipping_resume_bit_for_bit"),
    ],
    "ranks that see different losses decide apart, and hang": [
        ("test_skip_two_ranks.py", "a_bad_loss_on_one_rank_skips_the_step_on_both"),
    ],
    "an override of the rate is applied again at every resume, moves the weight decay, or comes a step late": [
        (OVERRIDE, "a_factor_on_resume_is_exact_and_applied_once_over_three_resumes"),
        (OVERRIDE, "begins_with_the_step_that_opens_at_the_start_in_its_unit"),
        ("test_override_options.py", "another_weight_decay_is_the_same_over_three_resumes"),
    ],
    "an override of the rate resets the step, the position in the data or the stage of a ramp": [
        (OVERRIDE, "counters_and_data_go_on_as_if_there_were_no_override"),
        (OVERRIDE, "over_a_batch_ramp_the_rate_is_a_function_of_the_samples_after_any_resume"),
    ],
    "a skip needs a gradient scaler": [(SKIP, "bf16_mixed_skips_without_a_gradient_scaler")],
    "an option that is gone or unknown is passed over in silence": [
        ("test_batch_schedule.py", "a_ramp_that_cannot_be_read_or_does_not_end_there_is_refused"),
        ("test_problems.py", "a_class_is_judged_by_class_path_and_each_of_its_arguments"),
        ("test_own_project.py", "a_wrong_argument_in_a_plain_command_line_is_named"),
    ],
    "a range of steps to skip drops micro-batches, or no counter knows of it after a resume": [
        ("test_skip.py", "whole_global_batches_leave_the_stream"),
        ("test_datamodule.py", "skipping_steps_drops_exactly_their_data"),
        ("test_progress.py", "dropped_ranges_move_the_position_and_no_counter"),
        ("test_progress.py", "state_survives_a_resume"),
    ],
    "with default options a running mean stands at the first value for ever": [
        (SKIP, "with_the_defaults_statistics_follow_the_run_and_nothing_is_skipped"),
    ],
    "the gradient norm that is logged is the one after clipping, or counts copies of a shard": [
        ("callbacks/test_grad_norm.py", "is_logged_before_clipping"),
        ("distributed/test_mesh.py", "the_norm_counts_every_piece_once_on_two_by_two_ranks"),
    ],
    "8-bit states are lost or mixed up when shards are saved, cut across, or read by another number of ranks": [
        ("test_eight_bit_ranks.py", "it_resumes_bit_for_bit"),
        ("test_eight_bit_ranks.py", "every_way_of_cutting_was_among_them"),
        ("test_eight_bit_ranks.py", "two_one_and_four_ranks_find_the_very_same_states"),
    ],
    "what is frozen decays or moves by momentum, or too much is set free in the end": [
        ("test_layer_norm_freeze.py", "in_a_window_norms_and_their_moments_keep_every_bit_and_move_before_and_after"),
        ("test_layer_norm_freeze.py", "only_what_was_frozen_here_is_set_free_in_the_end"),
        ("test_layer_norm_freeze.py", "resumes_bit_for_bit_from_before_within_and_after_the_window"),
    ],
    "under sharding a norm that is not finite is not seen": [
        ("test_skip_two_ranks.py", "a_nan_in_one_shard_skips_on_both_and_resumes_bit_for_bit"),
        ("test_clip_two_ranks.py", "ranks_decide_alike_and_a_nan_in_one_shard_skips_the_step_and_enters_nothing"),
    ],
    "skips go on for ever": [
        (SKIP, "a_run_of_nan_is_stopped_with_weights_as_they_were"),
        (SKIP, "a_shift_of_level_is_adapted_to"),
        ("test_skip_two_ranks.py", "both_ranks_stop_at_the_cap_and_at_the_same_step"),
    ],
}


@pytest.mark.parametrize("failure", FAILURES)
def test_it_is_held_against_by_tests_that_exist(failure: str) -> None:
    for file, function in FAILURES[failure]:
        (path,) = TESTS.rglob(file)
        assert re.search(rf"^def test_{function}\(", path.read_text(), re.MULTILINE), f"{file}: {function}"


def test_all_seventeen_are_there() -> None:
    assert len(FAILURES) == 17
