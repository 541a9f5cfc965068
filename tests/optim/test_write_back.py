from __future__ import annotations

import torch
from torch import nn

from lit_stable.optim.write_back import recipe_values, write_back


def optimizer(**options) -> torch.optim.AdamW:
    groups = [{"name": name, "params": [nn.Parameter(torch.ones(1))], "lr_factor": 1.0} for name in ("a", "b")]
    return torch.optim.AdamW(groups, **options)


def test_the_recipe_wins_over_what_was_restored_and_changes_are_told():
    made = optimizer(betas=(0.9, 0.95), weight_decay=0.1)
    recipe = recipe_values(made)
    made.load_state_dict(optimizer(betas=(0.9, 0.98), weight_decay=0.1, lr=5.0, eps=1e-6).state_dict())
    made.param_groups[1]["lr_factor"] = 0.5
    lines = write_back(made, recipe)
    assert recipe_values(made) == recipe
    moved = ["betas (0.9, 0.98) -> (0.9, 0.95)", "eps 1e-06 -> 1e-08"]
    changes = [("a", change) for change in moved] + [("b", change) for change in ["lr_factor 0.5 -> 1.0", *moved]]
    assert lines == [f"optimizer group {name}: {change} (recipe)" for name, change in changes]


def test_a_list_equals_a_tuple_and_nothing_is_told():
    made = optimizer()
    recipe = recipe_values(made)
    for group in made.param_groups:
        group["betas"] = list(group["betas"])  # as some checkpoints have it
    assert write_back(made, recipe) == []
    assert made.param_groups[0]["betas"] == (0.9, 0.999)
