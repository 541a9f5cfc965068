from __future__ import annotations

import re

import pytest

from lit_stable.data.another_order import another_order

SEED, WIDTH = "data.seed_data: 1 -> 7", "model.gpt.dropout: 0.0 -> 0.1"


def test_only_what_orders_samples_is_told_of():
    assert another_order([WIDTH, "data.num_workers: 0 -> 2"], 40, [(44, 56)]) is None
    told = another_order([WIDTH, SEED, "data.sequence_length: 32 -> 16"], 40, [])
    assert told is not None
    assert told.startswith("another order of samples from here on (data.seed_data, data.sequence_length): of an epoch")
    assert "left out" not in told


def test_what_was_left_out_may_come_again():
    told = another_order([SEED], 45, [(44, 56)])
    assert told is not None
    assert "and some that were left out" in told


@pytest.mark.parametrize("consumed", [0, 40, 43])
def test_ranges_ahead_were_left_out_for_what_stood_there(consumed):
    sentence = (
        "data.seed_data: 1 -> 7: puts other samples at stream positions 44 to 55, which are left out for what stood"
        " there; keep what it was up to a checkpoint behind them, of 44 samples or more."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        another_order([SEED], consumed, [(44, 56)])
