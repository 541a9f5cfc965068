"""What a file of one device must hold to go on under a sharding strategy; tests/distributed shows that it does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies.fsdp2 import FSDP2Strategy
from lit_stable.strategies.one_file import load_one_file


@pytest.mark.parametrize("groups", [[("weights", 2)], [("norms", 1)], [("weights", 1), ("biases", 1)]])
def test_other_groups_are_refused_before_anything_is_loaded(tmp_path: Path, groups: list[tuple[str, int]]) -> None:
    module = nn.Linear(2, 2, bias=False)
    before = module.weight.detach().clone()
    optimizer = torch.optim.AdamW([{"name": "weights", "params": [module.weight]}])
    saved = [{"name": name, "params": list(range(count))} for name, count in groups]
    state = {"state": {}, "param_groups": saved}
    torch.save({"state_dict": {"weight": torch.ones(2, 2)}, "optimizer_states": [state]}, tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationException, match=r"a\.ckpt: its optimizer has the groups .*'weights', 1\)\]"):
        load_one_file(tmp_path / "a.ckpt", module, [optimizer])
    assert torch.equal(module.weight, before)


class Intruder:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.folder,)


@pytest.mark.parametrize("asked", [None, True])
def test_no_more_is_unpickled_than_the_caller_lets(tmp_path: Path, asked: bool | None) -> None:
    module = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW([{"name": "weights", "params": [module.weight]}])
    saved = {"state_dict": module.state_dict(), "optimizer_states": [], "more": Intruder(tmp_path / "was here")}
    torch.save(saved, path := tmp_path / "a.ckpt")
    strategy = FSDP2Strategy()
    strategy.optimizers = [optimizer]
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        strategy.load_checkpoint(path, asked)
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        load_one_file(path, module, [optimizer], weights_only=asked)
    assert not (tmp_path / "was here").exists()
    with pytest.raises(ValueError, match=r"zip\(\)"):  # it was read: what it lacks is found
        load_one_file(path, module, [optimizer], weights_only=False)
    assert (tmp_path / "was here").exists()
