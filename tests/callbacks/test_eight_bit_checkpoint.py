"""Telling 8-bit optimizer states in checkpoints. Whole loads: test_eight_bit_adam.py and tests/distributed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from eight_bit_models import Kinds, converted, give_gradients
from torch.optim import AdamW

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_checkpoint import prepare_optimizers, refuse_unread, saved_bits
from lit_stable.callbacks.eight_bit_states import bits_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint whose one optimizer has 8-bit moments."""
    model = Kinds()
    names = [name for name, _ in model.named_parameters()]
    state = converted(model).state_dict()
    by_name = {names[number]: values for number, values in state["state"].items()}
    groups = [{**g, "params": [names[n] for n in g["params"]]} for g in state["param_groups"]]
    dcp.save({"optimizer_0": {"state": by_name, "param_groups": groups}}, checkpoint_id=tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_names_are_told_apart_from_what_is_kept_of_them() -> None:
    keys = ["state.a.weight.exp_avg_codes", "state.a.weight.step", "state.exp_avg.exp_avg", "param_groups.0.lr"]
    assert saved_bits(keys) == {"a.weight": 8, "exp_avg": 32}


def test_an_optimizer_that_would_find_nothing_is_refused_before_the_load(folder: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"{folder}: its optimizer state is in 8 bit, and AdamW reads 32"
    ):
        prepare_optimizers(folder, [AdamW(Kinds().parameters())])


def test_a_converted_one_takes_the_form_that_is_about_to_be_loaded(folder: Path) -> None:
    model = Kinds()
    optimizer = converted(model)
    prepare_optimizers(folder, [optimizer])
    assert bits_of(optimizer.state[model.odd.weight]) == 8
    optimizer.plan = type(optimizer.plan)(optimizer.plan.tensors, "dynamic", converts=True)
    for plan in optimizer.plan.tensors.values():
        object.__setattr__(plan, "bits", 32)
    prepare_optimizers(folder, [optimizer])
    assert bits_of(optimizer.state[model.odd.weight]) == 8
    assert optimizer.param_groups[0]["state_map"] == "dynamic"


def test_files_and_what_is_not_there_need_no_preparation(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"x")
    for path in (tmp_path / "a.ckpt", tmp_path / "none.ckpt", Path("s3://bucket/a.ckpt")):
        prepare_optimizers(path, [AdamW(Kinds().parameters())])


def test_codes_in_an_optimizer_that_knows_none_are_seen_after_the_load() -> None:
    model, plain = Kinds(), AdamW(Kinds().parameters())
    optimizer = converted(model)
    refuse_unread([optimizer, plain])
    give_gradients(model, 0)
    plain.load_state_dict({**optimizer.state_dict(), "param_groups": plain.state_dict()["param_groups"]})
    with pytest.raises(MisconfigurationException, match="the checkpoint: its optimizer state is in 8 bit, and AdamW"):
        refuse_unread([optimizer, plain])


def test_torch_itself_would_have_ruined_the_codes() -> None:
    """Why loading is done here: torch casts every tensor of a state to the dtype of the parameter."""
    plain = AdamW(Kinds().parameters())
    plain.load_state_dict({**converted(Kinds()).state_dict(), "param_groups": plain.state_dict()["param_groups"]})
    assert plain.state[plain.param_groups[0]["params"][0]]["exp_avg_codes"].dtype == torch.float32
