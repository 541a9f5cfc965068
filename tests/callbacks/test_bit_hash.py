from __future__ import annotations

import pytest
import torch

from lit_stable.callbacks import bit_hash as module
from lit_stable.callbacks.bit_hash import bit_hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_any_one_bit_changes_it(dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 5) * 40).to(dtype)
    whole = int(bit_hash(tensor))
    assert int(bit_hash(tensor.clone())) == whole
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    for place in (0, 7, 14):
        for bit in range(8 * tensor.element_size()):
            other = tensor.clone()
            bits = other.view(-1).view(integer)
            bits[place] = bits[place] ^ torch.tensor(1, dtype=integer).bitwise_left_shift(bit)
            assert int(bit_hash(other)) != whole


def test_order_zero_signs_and_nan_payloads_count() -> None:
    a = torch.tensor([1.0, 2.0, 0.0])
    assert int(bit_hash(a)) != int(bit_hash(torch.tensor([2.0, 1.0, 0.0])))
    assert int(bit_hash(a)) != int(bit_hash(torch.tensor([1.0, 2.0, -0.0])))


def test_the_pieces_in_which_it_is_computed_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100)
    whole = int(bit_hash(tensor))
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert int(bit_hash(tensor)) == whole
    assert int(bit_hash(tensor.view(10, 10).t().contiguous().t())) == whole  # by value, not by layout
    assert int(bit_hash(torch.empty(0))) == 0
