"""8-bit Adam on one, two and four gloo processes: the same bits however parameters are cut, and checkpoints for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eight_bit_models import EIGHT_BIT, digest, eight_bit
from launch import of, run_scenarios
from rank_scenarios_eight_bit import NoteStates, fit_meshed
from tiny_gpt_run import SaveEveryMicroBatch, fit

TWO = [
    "steps_fsdp2",
    "same_weights",
    "resume_ddp",
    "resume_fsdp2",
    "resume_fsdp2_full",
    "without_saves",
    "convert_fsdp2",
    "convert_fsdp2_full",
    "file_of_ddp_for_fsdp2",
    "fit_with_tensor_parallelism",
    "offloaded_on_a_cpu",
    "fsdp1",
]
FOUR = [
    "steps_fsdp2",
    "steps_hybrid",
    "steps_fsdp2_over_tp",
    "steps_tp",
    "unplaceable",
    "fit_on_two_by_two",
    "states_of_checkpoint",
]
SCRIPT = "rank_scenarios_eight_bit.py"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(TWO, tmp_path_factory.mktemp("two"), script=SCRIPT)


@pytest.fixture(scope="module")
def one(two: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank finds in the checkpoint of two, and writes for four."""
    folder, note, source = tmp_path_factory.mktemp("four"), NoteStates(), two["resume_fsdp2"]
    assert "error" not in source, source["error"]
    own = (eight_bit(), note, SaveEveryMicroBatch(folder, only=(0,)))
    fit("fsdp2", steps=3, ckpt_path=source["checkpoint"], callbacks=own)
    return {"digest": digest(note.at["start"]), "folder": folder}


@pytest.fixture(scope="module")
def four(one: dict[str, Any]) -> dict[str, Any]:
    return run_scenarios(FOUR, one["folder"], processes=4, script=SCRIPT)


@pytest.fixture(scope="module")
def results(two: dict[str, Any], four: dict[str, Any]) -> dict[str, Any]:
    return {
        **{f"2 {name}": value for name, value in two.items()},
        **{f"4 {name}": value for name, value in four.items()},
    }


@of("2 steps_fsdp2", "4 steps_fsdp2", "4 steps_hybrid", "4 steps_fsdp2_over_tp", "4 steps_tp")
def test_weights_codes_and_maxima_are_those_of_one_process_bit_for_bit(result: dict[str, Any]) -> None:
    assert sorted(result["eight_bit"]) == sorted(EIGHT_BIT)
    assert not any(result["differing"])


@of("2 steps_fsdp2", "4 steps_fsdp2")
def test_what_is_kept_how_follows_from_whole_shapes(result: dict[str, Any]) -> None:
    sharded, alone = result["planned"]
    assert sharded == alone
    assert [name for name, bits, _ in alone if bits == 8] == ["even.weight"]


@of("4 steps_fsdp2_over_tp")
def test_every_way_of_cutting_was_among_them(result: dict[str, Any]) -> None:
    assert [kind for kind in result["placements"] if "Strided" in kind]
    assert "(Shard(dim=0), Shard(dim=1))" in result["placements"]


@of("4 unplaceable")
def test_cuts_that_blocks_cannot_follow_are_refused_by_name(result: dict[str, Any]) -> None:
    twice, three = result["said"]
    assert twice.startswith(
        "`EightBitAdam`: even.weight (64, 512) is placed as (Shard(dim=1), Shard(dim=1)), and 8-bit"
    )
    assert three.startswith("`EightBitAdam`: experts (3, 20, 30) is placed as (Replicate(), Shard(dim=2)), and 8-bit")
    assert twice.endswith("name its module in keep_32_bit.")


@of("2 same_weights")
def test_sharded_or_not_the_same_gradients_give_the_same_weights(result: dict[str, Any]) -> None:
    assert result == {"weights": True, "states": []}


@of("2 resume_ddp", "2 resume_fsdp2", "2 resume_fsdp2_full")
def test_it_resumes_bit_for_bit(result: dict[str, Any]) -> None:
    for point, found in result["resumed"].items():
        assert found == [True, [], True], point
    assert result["uint8"] == 2 * 8
    # Two tables of 80 x 32 and 5 norms in 32 bit; 4 matrices a block in rows of 32, one of which in rows of 128.
    wide, rows = 80 * 32 + 5 * 32, 2 * (96 + 32 + 128 + 32)
    narrow = 2 * (96 + 32 + 2 * 128) * 32
    assert result["measured"] == pytest.approx((8 * wide + 2 * narrow + 8 * rows) / (wide + narrow))


@of("2 without_saves")
def test_saving_changes_nothing(result: dict[str, Any], two: dict[str, Any]) -> None:
    assert result["weights"] == two["resume_fsdp2"]["weights"]


@of("4 fit_on_two_by_two")
def test_a_fit_sharded_over_two_dimensions_resumes_bit_for_bit(result: dict[str, Any]) -> None:
    assert result["resumed"] == [[], True]
    assert result["eight_bit"] == ["net.0.weight", "net.2.weight"]
    cut = "1 tensors with blocks cut between ranks, which agree on their maxima"
    assert result["said"] == f"EightBitAdam, dynamic map; {cut}"


@of("2 fit_with_tensor_parallelism")
def test_a_fit_with_tensor_parallelism_goes_as_in_one_process(result: dict[str, Any]) -> None:
    """Gradients are sums over ranks there, so to a rounding."""
    states, weights = torch.load(result["path"])
    alone, own = fit_meshed(1, 1)
    for name, weight in own.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
    for name, state in alone["end"].items():
        for key, value in state.items():
            if value.dtype == torch.uint8:
                assert (states[name][key] == value).float().mean() > 0.995, (name, key)
            else:
                torch.testing.assert_close(states[name][key], value, rtol=1e-4, atol=1e-7)


@of("2 offloaded_on_a_cpu")
def test_offloading_on_a_cpu_changes_nothing(result: dict[str, Any]) -> None:
    assert result == {"weights": True, "states": []}


@of("2 fsdp1")
def test_a_fit_under_fsdp1_is_refused_at_the_start(result: dict[str, Any]) -> None:
    assert result["said"].startswith("`EightBitAdam`: FSDP1 flattens parameters together")
    assert result["said"].endswith("use strategy fsdp2 (ModelParallelStrategy with fully_shard).")


@of("4 fit_on_two_by_two")
def test_its_checkpoint_has_the_same_states_for_one_rank(result: dict[str, Any]) -> None:
    states, _ = fit_meshed(1, 1, resume=result["checkpoint"])
    assert digest(states["start"]) == result["digest"]


@of("4 states_of_checkpoint")
def test_two_one_and_four_ranks_find_the_very_same_states(
    result: dict[str, Any], one: dict[str, Any], two: dict[str, Any]
) -> None:
    assert two["resume_fsdp2"]["digest"] == one["digest"] == result["digest"]


@of("2 convert_fsdp2", "2 convert_fsdp2_full")
def test_a_checkpoint_in_the_other_form_is_refused_in_a_sentence_or_converted(result: dict[str, Any]) -> None:
    to_8, unread, to_32 = result["refused"]
    assert "another form than this run, 32 bit to 8 bit (dynamic): gpt.blocks.0.attention.qkv.weight, " in to_8
    assert "its optimizer state is in 8 bit, and AdamW reads 32; add `EightBitAdam`" in unread
    assert "another form than this run, 8 bit (dynamic) to 32 bit: gpt.blocks.0.attention.qkv.weight, " in to_32
    wide = ["exp_avg", "exp_avg_sq", "step"]
    codes = ["exp_avg_absmax", "exp_avg_codes", "exp_avg_sq_absmax", "exp_avg_sq_codes"]
    assert result["keys"] == [sorted(wide + codes), wide, wide]
    assert result["steps"] == [[1], [2], [2]]
    plain, narrow, last = result["losses"]
    assert narrow + last == pytest.approx(plain[1:], abs=1e-3)
    assert result["largest"] > 1e-3


@of("2 file_of_ddp_for_fsdp2")
def test_a_file_of_ddp_goes_on_sharded_with_the_same_states(result: dict[str, Any]) -> None:
    assert result == {"differing": [], "converted_differing": []}
