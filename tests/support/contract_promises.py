"""What every callback promises, one function each: it looks at fits that were made, and asserts."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_entries import ENTRIES, make
from contract_fits import QuickRuns, Run, Runs
from tiny_fit import assert_same_bits

PROMISES: dict[str, Callable[[Any], None]] = {}
#: Those that a fit with one save and a resume show.
QUICK: dict[str, Callable[[Any], None]] = {}


def promise(function: Callable[[Runs], None]) -> None:
    PROMISES[function.__name__] = function


def quick_promise(function: Callable[[QuickRuns], None]) -> None:
    PROMISES[function.__name__] = QUICK[function.__name__] = function


@promise
def with_its_arguments_it_acts(runs: Runs) -> None:
    """Or the promises below would be kept by one that never does anything."""
    for name, run in runs.by_itself.items():
        assert differ(run, runs.company), name


def differ(left: Run, right: Run) -> bool:
    try:
        assert_same_bits(left.numbers(), right.numbers())
    except AssertionError:
        return True
    return False


@promise
def idle_it_is_as_good_as_absent(runs: Runs) -> None:
    assert_same(runs, runs.idle, runs.bare)


@promise
def with_action_log_it_is_as_good_as_absent(runs: Runs) -> None:
    if runs.log is not None:
        assert_same(runs, runs.log, runs.bare)


@promise
def saving_changes_nothing(runs: Runs) -> None:
    assert_same(runs, runs.saving, runs.straight)
    assert_same_state(runs, runs.saving, runs.straight)


@quick_promise
def a_resume_from_any_save_point_equals_the_straight_run(runs: QuickRuns) -> None:
    for point, resumed in runs.resumed.items():
        assert_same(runs, resumed, runs.straight, point)
        assert_same_state(runs, resumed, runs.straight, point)
        all_losses, rest = len(runs.straight.losses), len(resumed.losses)
        assert rest == all_losses if point == "before_first_step" else 0 < rest < all_losses, "goes on from there"


@quick_promise
def its_state_survives_the_restricted_unpickler(runs: QuickRuns) -> None:
    for name in runs.names:
        state = runs.straight.states[name]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        before = repr(loaded)
        twin = make(name, ENTRIES[name].acts)
        twin.load_state_dict(loaded)
        assert repr(loaded) == before, f"{name}: the argument was changed"
        assert_same_bits(twin.state_dict(), state, name)


@quick_promise
def a_checkpoint_with_it_holds_plain_data(runs: QuickRuns) -> None:
    for point in runs.points:
        path = runs.folder / f"{point}.ckpt"
        stored = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)
        assert "callbacks" in stored


@quick_promise
def all_ranks_decide_alike(runs: QuickRuns) -> None:
    assert len(runs.ranks) == runs.host.ranks
    for other in runs.ranks[1:]:
        assert_same_bits(other, runs.ranks[0])


@quick_promise
def nothing_is_left_behind(runs: QuickRuns) -> None:
    assert runs.left_behind == runs.left_by_itself


@promise
def one_trainer_fits_twice(runs: Runs) -> None:
    assert runs.second_fit == [runs.steps + 2, runs.steps + 2]


def assert_same(runs: QuickRuns, left: Run, right: Run, where: str = "") -> None:
    """Equal bits on a CPU. On a GPU, where kernels may add up in any order, losses that are near."""
    losses = right.losses[-len(left.losses) :]  # a resumed run has the last ones
    if runs.host.accelerator == "cpu":
        assert_same_bits(left.numbers(), right.numbers(), where)
        assert left.losses == losses, where
    else:
        torch.testing.assert_close(torch.tensor(left.losses), torch.tensor(losses), rtol=0.03, atol=0.03, msg=where)


def assert_same_state(runs: QuickRuns, left: Run, right: Run, where: str = "") -> None:
    """Every callback's state, to the bit on a CPU; what counts steps, samples and tokens everywhere."""
    if runs.host.accelerator == "cpu":
        assert_same_bits(left.states, right.states, where)
    assert_same_bits(left.states["Progress"], right.states["Progress"], where)


def broken(runs: QuickRuns) -> dict[str, str]:
    """What is wrong, by the promise that is not kept."""
    asked = PROMISES if isinstance(runs, Runs) else QUICK
    found = {name: _what_is_wrong(function, runs) for name, function in asked.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def _what_is_wrong(function: Callable[[Any], None], runs: QuickRuns) -> str:
    try:
        function(runs)
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}"[:2000]
    return ""
