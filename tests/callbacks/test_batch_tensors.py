from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_stable.callbacks.batch_tensors import batch_shape, samples_and_tokens, tensors

B, T = 2, 6


class Pair(NamedTuple):
    ids: torch.Tensor
    rest: Any


@dataclass
class Record:
    name: str
    ids: torch.Tensor
    labels: torch.Tensor


def ids() -> torch.Tensor:
    return torch.zeros(B, T)


def test_tensors_come_in_order_from_any_nesting() -> None:
    made = [torch.tensor(n) for n in range(5)]
    batch = {"a": made[0], "b": ["text", (made[1], Pair(made[2], {"c": made[3]}))], "d": Record("x", made[4], made[0])}
    assert [int(t) for t in tensors(batch)] == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    "batch",
    [
        ids(),
        (ids(), ids()),
        [torch.zeros(B), ids()],
        {"source": torch.zeros(B), "ids": ids(), "name": "a"},
        UserDict({"input_ids": ids(), "labels": ids()}),
        Pair(ids(), {"deep": ids()}),
        Record("a", ids(), torch.zeros(B)),
        ("a", {"deep": [ids()]}),
        torch.zeros(B, T, 3),
    ],
)
def test_the_shape_is_that_of_the_first_tensor_with_rows_and_positions(batch: Any) -> None:
    assert batch_shape(batch) == (B, T)
    assert samples_and_tokens(batch) == (B, B * T)


@pytest.mark.parametrize("batch", [torch.zeros(3), {"name": "a"}, [], 3, Record])
def test_without_such_a_tensor_there_is_no_shape(batch: Any) -> None:
    assert batch_shape(batch) is None


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(3), (3, 3)),
        (torch.zeros(()), (1, 1)),
        ({"text": "a", "weights": torch.zeros(4)}, (4, 4)),
        ({"label": torch.zeros(3), "ids": torch.zeros(3, 5)}, (3, 15)),
        ({"offsets": torch.zeros(9), "packed": torch.zeros(1, 40)}, (1, 40)),
    ],
)
def test_samples_are_rows_and_tokens_are_positions(batch: Any, expected: tuple[int, int]) -> None:
    assert samples_and_tokens(batch) == expected


def test_a_batch_without_a_tensor_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"batch of type dict: holds no tensor .* `count_batch\(batch\)"
    ):
        samples_and_tokens({"text": ["a", "b"]})
