"""What the garbage collector does not walk while a run is under way."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from lightning.pytorch import Callback
from tiny_gpt_run import fit

from lit_stable.run.permanent_objects import PermanentObjects


class Counts(Callback):
    """Notes after each micro-batch how many objects are put away; ends the run with an error if so asked."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(gc.get_freeze_count())
        if self.fails:
            raise RuntimeError("as planned")


def test_from_the_first_micro_batch_on_what_lives_is_put_away_until_the_fit_ends() -> None:
    counts = Counts()
    fit(steps=2, callbacks=(PermanentObjects(), counts))
    assert min(counts.seen) > 10_000
    assert gc.get_freeze_count() == 0


def test_a_fit_that_ends_in_an_error_brings_it_back() -> None:
    counts = Counts(fails=True)
    with pytest.raises(RuntimeError, match="as planned"):
        fit(steps=2, callbacks=(PermanentObjects(), counts))
    assert counts.seen[0] > 10_000
    assert gc.get_freeze_count() == 0
