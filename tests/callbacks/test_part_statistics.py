from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_stable.callbacks.part_statistics import PartStatistics

CPU = torch.device("cpu")


class Sums(PartStatistics):
    """What was taken in of each part, added up."""

    rows = 2

    def judge(self, norms: Tensor, total: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        self._take_in(self.values + torch.stack([norms, norms * 0 + 1]), norms, accepted)
        return norms, norms


def sums(*names: str) -> Sums:
    statistics = Sums()
    statistics.begin(names, CPU)
    return statistics


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_what_is_zero_or_not_finite_enters_nothing_and_hinders_no_other_part(bad: float) -> None:
    statistics = sums("a", "b")
    statistics.judge(torch.tensor([bad, 2.0]), torch.tensor(1.0), torch.tensor(True))
    assert statistics.state_dict() == {"a": [0.0, 0.0], "b": [2.0, 1.0]}


def test_a_step_that_is_not_taken_enters_nothing() -> None:
    statistics = sums("a")
    statistics.judge(torch.tensor([2.0]), torch.tensor(1.0), torch.tensor(False))
    assert statistics.state_dict() == {"a": [0.0, 0.0]}


def test_parts_find_their_own_by_name_whatever_the_order() -> None:
    statistics = sums("a", "b", "c")
    statistics.judge(torch.tensor([1.0, 0.1, 3.0]), torch.tensor(1.0), torch.tensor(True))
    saved = statistics.state_dict()
    other = Sums()
    other.load_state_dict(saved)
    assert other.state_dict() == saved  # before it knows its parts
    other.begin(["c", "new", "b"], CPU)
    assert other.state_dict() == {"c": saved["c"], "new": [0.0, 0.0], "b": saved["b"]}


def test_there_is_nothing_to_save_before_the_parts_are_known() -> None:
    assert Sums().state_dict() == {}
    Sums().load_state_dict({})
