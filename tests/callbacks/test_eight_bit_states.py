"""States in 8 and 32 bit, into each other and out of checkpoints. Sharded ones: tests/distributed."""

from __future__ import annotations

import pytest
import torch
from tiny_fit import assert_same_bits

from lit_stable.callbacks.eight_bit_blocks import require_bitsandbytes
from lit_stable.callbacks.eight_bit_states import bits_of, convert, fresh_state, place, state_bytes

require_bitsandbytes()
WEIGHT = torch.randn(6, 300)


def learned() -> dict[str, torch.Tensor]:
    """A 32-bit state after some steps."""
    return {"step": torch.tensor(5.0), "exp_avg": torch.randn(6, 300), "exp_avg_sq": torch.rand(6, 300)}


def test_a_fresh_state_is_all_zeros() -> None:
    assert {key: (tuple(v.shape), v.dtype) for key, v in fresh_state(WEIGHT, 8).items()} == {
        "step": ((), torch.float32),
        "exp_avg_codes": ((6, 300), torch.uint8),
        "exp_avg_absmax": ((6, 2), torch.float32),
        "exp_avg_sq_codes": ((6, 300), torch.uint8),
        "exp_avg_sq_absmax": ((6, 2), torch.float32),
    }
    for bits in (8, 32):
        assert not any(value.any() for value in fresh_state(WEIGHT, bits).values())  # type: ignore[arg-type]
    assert fresh_state(WEIGHT.bfloat16(), 32)["exp_avg"].dtype == torch.float32


def test_the_form_of_a_state_is_told_by_its_keys() -> None:
    assert [bits_of(fresh_state(WEIGHT, bits)) for bits in (8, 32)] == [8, 32]
    assert bits_of({"step": torch.zeros(()), "momentum_buffer": WEIGHT}) is None


@pytest.mark.parametrize("name", ["dynamic", "linear"])
def test_to_8_bit_and_back_is_near_and_a_second_time_nearly_the_same(name: str) -> None:
    wide = learned()
    narrow = convert(WEIGHT, wide, 8, name)  # type: ignore[arg-type]
    again = convert(WEIGHT, narrow, 32, "dynamic", from_map=name)  # type: ignore[arg-type]
    assert float(narrow["step"]) == float(again["step"]) == 5.0
    for key in ("exp_avg", "exp_avg_sq"):
        largest = wide[key].abs().max()
        assert (again[key] - wide[key]).abs().max() < 0.02 * largest
        assert (again[key] - wide[key]).abs().max() > 0


def test_another_map_is_a_conversion_and_the_same_form_is_none() -> None:
    narrow = convert(WEIGHT, learned(), 8, "dynamic")
    assert convert(WEIGHT, narrow, 8, "dynamic") is narrow
    linear = convert(WEIGHT, narrow, 8, "linear", from_map="dynamic")
    assert not torch.equal(linear["exp_avg_codes"], narrow["exp_avg_codes"])
    values = [convert(WEIGHT, s, 32, "dynamic", m)["exp_avg"] for s, m in ((narrow, "dynamic"), (linear, "linear"))]
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0.02 * float(values[0].abs().max()))


def test_a_second_moment_that_was_lost_is_not_zero_in_32_bit_either() -> None:
    """Torch's own step from there would divide the first by eps."""
    wide = {**learned(), "exp_avg_sq": torch.full((6, 300), 1e-9)}
    wide["exp_avg_sq"][:, ::256] = 1.0  # the first of each block
    narrow = convert(WEIGHT, wide, 8, "linear")
    assert not narrow["exp_avg_sq_codes"][:, 1:256].any()
    again = convert(WEIGHT, narrow, 32, "dynamic", from_map="linear")
    assert (again["exp_avg_sq"][again["exp_avg"] != 0] > 1e-3).all()


def test_converting_leaves_what_it_reads() -> None:
    wide = learned()
    before = {key: value.clone() for key, value in wide.items()}
    narrow = convert(WEIGHT, wide, 8, "dynamic")
    kept = {key: value.clone() for key, value in narrow.items()}
    convert(WEIGHT, narrow, 32, "dynamic")
    assert_same_bits(wide, before)
    assert_same_bits(dict(narrow), kept)


def test_what_a_checkpoint_holds_keeps_its_dtype() -> None:
    half = WEIGHT.bfloat16()
    assert place(half, "exp_avg_codes", torch.ones(6, 300, dtype=torch.uint8)).dtype == torch.uint8
    assert place(half, "exp_avg_absmax", torch.ones(6, 2)).dtype == torch.float32
    assert place(half, "exp_avg", half).dtype == torch.float32
    assert torch.equal(place(half, "step", 3), torch.tensor(3.0))


def test_bytes_are_counted_without_the_count_of_steps() -> None:
    assert state_bytes([fresh_state(WEIGHT, 8), fresh_state(WEIGHT, 32)]) == 6 * (2 * 300 + 2 * 2 * 4) + 8 * 6 * 300
