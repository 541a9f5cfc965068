from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.checkpoint_contents import (
    CheckpointError,
    or_not_written,
    refuse_foreign,
    refuse_other_model,
    shapes_of,
    told_as_a_sentence,
)

PATH = Path("some/last.ckpt")
LIGHTNING = {"state_dict": {}, "pytorch-lightning_version": "2.6.6"}


def test_a_checkpoint_error_is_caught_as_a_misconfiguration() -> None:
    assert issubclass(CheckpointError, MisconfigurationException)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ([1, 2], "is no Lightning checkpoint but a list; give one"),
        ({}, "is no Lightning checkpoint but a dict of nothing; give one"),
        ({"model": 1, "step": 2}, "is no Lightning checkpoint but a dict of model, step; give one"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "but a dict of a, b, c ...; give one"),
        ({"state_dict": {}}, "but a dict of state_dict; give one"),
    ],
)
def test_what_lightning_did_not_write_is_refused_with_what_it_is(held: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=f"^some/last.ckpt: .*{told} that a Trainer has saved"):
        refuse_foreign(PATH, held, needs_optimizer=False)


def test_weights_alone_are_enough_to_evaluate_and_not_to_go_on() -> None:
    refuse_foreign(PATH, LIGHTNING, needs_optimizer=False)
    with pytest.raises(CheckpointError, match=r"holds weights and no optimizer state, .* give a whole checkpoint"):
        refuse_foreign(PATH, LIGHTNING, needs_optimizer=True)
    refuse_foreign(PATH, {**LIGHTNING, "optimizer_states": []}, needs_optimizer=True)


def test_another_model_is_refused_with_the_first_difference_and_their_number() -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(
        CheckpointError, match=r"weight has shape \(4, 3\) in it and \(2, 3\) in the model; go on with the model that"
    ):
        refuse_other_model(PATH, {"weight": (4, 3), "bias": (2,)}, module, strict=True)
    stored = {"weight": (4, 3), "gain": (2,)}
    with pytest.raises(CheckpointError, match=r"weight has shape .* \(and 2 more differences\); go on"):
        refuse_other_model(PATH, stored, module, strict=True)
    with pytest.raises(CheckpointError, match=r"weight has shape \(4, 3\) in it and \(2, 3\) in the model; go on"):
        refuse_other_model(PATH, stored, module, strict=False)
    with pytest.raises(CheckpointError, match=r"the model has bias \(2,\), which it lacks; go on"):
        refuse_other_model(PATH, {"weight": (2, 3)}, module, strict=True)
    with pytest.raises(CheckpointError, match=r"it has gain \(2,\), which the model lacks; go on"):
        refuse_other_model(PATH, {**shapes_of(module.state_dict()), "gain": (2,)}, module, strict=True)
    refuse_other_model(PATH, {"weight": (2, 3), "gain": (2,)}, module, strict=False)


def test_objects_that_torch_does_not_load_unasked_are_named(tmp_path: Path) -> None:
    torch.save({"x": Path("y")}, tmp_path / "a.ckpt")
    with (
        pytest.raises(
            CheckpointError,
            match=r"a.ckpt: holds more than plain data, .* \(pathlib.PosixPath\); if you trust the file",
        ),
        told_as_a_sentence(tmp_path / "a.ckpt"),
    ):
        torch.load(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match=r"\(no words\); if you trust"), told_as_a_sentence(PATH):
        raise pickle.UnpicklingError("no\nwords")


def distributed_failure(error: Exception) -> BaseException:
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException("read", {1: (error, None)})  # type: ignore[dict-item]


def test_what_a_rank_says_about_a_load_is_told_as_a_sentence() -> None:
    told = r"last.ckpt: cannot be loaded into this model and optimizer \(no key a\); go on with those that wrote it"
    with pytest.raises(CheckpointError, match=told), told_as_a_sentence(PATH):
        raise distributed_failure(RuntimeError("no\n key a"))


@pytest.mark.parametrize("wrap", [lambda error: error, distributed_failure], ids=["file", "folder"])
def test_a_write_that_fails_is_told_with_the_room_that_is_left(wrap: Any, tmp_path: Path) -> None:
    told = r"last.ckpt: could not be written \(No space left on device; \S+ GiB are free there\); what was saved before"
    with pytest.raises(CheckpointError, match=told), or_not_written(tmp_path / "last.ckpt"):
        raise wrap(OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    ("guard", "error"),
    [
        (told_as_a_sentence, ValueError("a fault of ours")),
        (told_as_a_sentence, KeyboardInterrupt()),
        (or_not_written, ValueError("a fault of ours")),
        (or_not_written, distributed_failure(ValueError("a fault of ours"))),
    ],
)
def test_other_errors_pass_as_they_are(guard: Any, error: BaseException) -> None:
    with pytest.raises(type(error)), guard(PATH):
        raise error
