"""One bit that comes out otherwise the second time is found; passes that never agree are judged by their noise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import TinyData, TinyModule, Turns, assert_same_bits, quiet_trainer, snapshot
from torch import Tensor

from lit_stable.callbacks import Events, InvariantViolation, RepeatCheck
from lit_stable.callbacks.events import Event, read_events

#: Of steps without accumulation: each has one forward pass of its own, the first four more, the others two.
FIRST, SECOND = [2, 3, 4, 5], [7, 8]


def flipped(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(torch.int32).view(-1)[1] ^= 1
    return tensor


class Faulty(TinyModule):
    """Its last layer's output, or the gradient of its first layer, is changed in some of the passes."""

    def __init__(self, where: str, change: Any, **options: Any) -> None:
        super().__init__(**options)
        passes = itertools.count(1)
        if where == "forward":
            self.net[3].register_forward_hook(lambda m, i, output: change(next(passes), output))
        else:
            self.net[0].weight.register_hook(lambda gradient: change(next(passes), gradient))


def check(folder: Path, module: TinyModule, steps: int = 3, **options: Any) -> tuple[Any, list[Event]]:
    channel = Events()
    channel.folder = folder
    trainer = quiet_trainer(channel, RepeatCheck(None, **options), max_steps=steps, log_every_n_steps=1)
    trainer.fit(module, TinyData())
    path = folder / "events.jsonl"
    return trainer, read_events(path) if path.exists() else []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", [FIRST[1], FIRST[3], SECOND[0], SECOND[1]])
@pytest.mark.parametrize(("where", "part"), [("forward", "outputs"), ("backward", "net.0.weight")])
def test_one_flipped_bit_in_one_pass_is_found(tmp_path: Path, where: str, part: str, at: int) -> None:
    module = Faulty(where, lambda number, x: flipped(x) if number == at else x, dropout=0.5)
    trainer, (event,) = check(tmp_path, module)
    assert (event.step, event.kind) == (1 if at in FIRST else 2, "silent_corruption")
    assert (event.evidence["ranks"], event.evidence["part"]) == ([0], part)
    assert float(trainer.callback_metrics["stability/repeat_mismatches"]) == 0.0  # in step 3


def test_the_run_is_as_it_is_without_in_dropout_and_accumulation(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [RepeatCheck(None)]):
        trainer = quiet_trainer(*callbacks, log_every_n_steps=1, accumulate_grad_batches=2)
        torch.manual_seed(3)
        trainer.fit(TinyModule(dropout=0.5), TinyData(resumes=False))
        runs.append([snapshot(trainer), torch.rand(1)])
    assert_same_bits(*runs)


@pytest.mark.filterwarnings("ignore")
def test_passes_that_never_agree_are_judged_by_their_noise(tmp_path: Path) -> None:
    def noisy(number: int, x: Tensor) -> Tensor:
        return x * (1.0 + 1e-6 * (number % 7) + (0.5 if number == 11 else 0.0))  # in the check of step 3

    _, events = check(tmp_path, Faulty("forward", noisy), steps=4)
    assert [(event.step, event.kind) for event in events] == [(3, "silent_corruption")]
    assert 0.2 < events[0].evidence["difference"] < 1.0


@pytest.mark.filterwarnings("ignore")
def test_it_ends_the_run_if_it_is_told_to(tmp_path: Path) -> None:
    module = Faulty("forward", lambda number, x: flipped(x) if number == SECOND[1] else x)
    with pytest.raises(InvariantViolation, match="step 2: the same micro-batch came out twice not the same on ranks"):
        check(tmp_path, module, on_violation="raise")


def test_a_step_of_the_second_of_two_optimizers_is_checked_too() -> None:
    trainer = quiet_trainer(RepeatCheck(None), max_steps=2, log_every_n_steps=2)
    trainer.fit(Turns(), TinyData())
    assert float(trainer.callback_metrics["stability/repeat_mismatches"]) == 0.0
