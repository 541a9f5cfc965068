"""What a file of one device must hold to go on under a sharding strategy; tests/distributed shows that it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lit_stable.callbacks.base import MisconfigurationException
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
