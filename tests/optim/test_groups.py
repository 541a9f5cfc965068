import pytest
import torch
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.norm import LayerNorm, RMSNorm
from lit_stable.model.qk_norm import CosineScale
from lit_stable.optim.groups import audit, audit_rows, parameter_groups
from lit_stable.optim.options import PatternOptions


class Tiny(nn.Module):
    """One parameter of every kind, under names that say nothing."""

    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(10, 4)
        self.b = nn.LayerNorm(4)
        self.c = nn.Linear(4, 6)
        self.d = nn.RMSNorm(6)
        self.e = nn.Parameter(torch.ones(4, 6))
        self.f = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(4, 10, bias=False)


def by_name(groups, module):
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {group["name"]: [names[parameter] for parameter in group["params"]] for group in groups}


def test_a_parameter_is_grouped_by_what_it_is():
    module = Tiny()
    groups = parameter_groups(module, weight_decay=0.1)
    assert by_name(groups, module) == {
        "weights": ["e", "c.weight", "head.weight"],
        "embeddings": ["a.weight"],
        "norms": ["b.weight", "b.bias", "d.weight"],
        "biases": ["f", "c.bias"],
    }
    assert {group["name"]: group["weight_decay"] for group in groups} == {
        "weights": 0.1,
        "embeddings": 0.1,
        "norms": 0.0,
        "biases": 0.0,
    }


def test_the_norms_of_this_project_are_norms():
    module = nn.Sequential(LayerNorm(4), RMSNorm(4))
    assert by_name(parameter_groups(module, 0.1), module) == {"norms": ["0.weight", "0.bias", "1.weight"]}


def test_a_tied_head_is_an_embedding_and_counts_once():
    module = Tiny()
    module.head.weight = module.a.weight
    names = by_name(parameter_groups(module, 0.1), module)
    assert names["embeddings"] == ["a.weight"]
    assert names["weights"] == ["e", "c.weight"]


def test_embeddings_can_be_left_undecayed():
    decay = {g["name"]: g["weight_decay"] for g in parameter_groups(Tiny(), 0.1, decay_embeddings=False)}
    assert decay == {"weights": 0.1, "embeddings": 0.0, "norms": 0.0, "biases": 0.0}


def test_empty_groups_are_left_out():
    assert [group["name"] for group in parameter_groups(nn.Linear(2, 2), 0.1)] == ["weights", "biases"]


def test_a_flat_piece_of_a_linear_weight_is_still_a_weight():
    linear = nn.Linear(4, 6)
    linear.weight = nn.Parameter(torch.zeros(12))  # what a rank holds under FSDP1
    assert by_name(parameter_groups(linear, 0.1), linear) == {"weights": ["weight"], "biases": ["bias"]}


def test_frozen_parameters_are_in_no_group_and_the_audit_says_so():
    module = Tiny()
    module.a.requires_grad_(False)
    groups = parameter_groups(module, 0.1)
    assert "embeddings" not in by_name(groups, module)
    assert audit_rows(groups, module)[-1] == ("frozen", 1, 40, None, ["a.weight"])


def test_a_gain_without_gradient_keeps_its_value_and_a_weight_decays():
    module = Tiny()
    lr, weight_decay, steps = 0.1, 0.5, 10
    before = module.c.weight.detach().clone()
    optimizer = torch.optim.AdamW(parameter_groups(module, weight_decay), lr=lr)
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.equal(module.b.weight, torch.ones(4))
    torch.testing.assert_close(module.c.weight.detach(), before * (1 - lr * weight_decay) ** steps)


def test_the_audit_counts_every_parameter():
    module = Tiny()
    rows = audit_rows(parameter_groups(module, 0.1), module)
    assert rows[0] == ("weights", 3, 24 + 24 + 40, 0.1, ["e", "c.weight"])
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in module.parameters())


def test_the_audit_is_an_aligned_table():
    module = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30))
    module[0].bias.requires_grad_(False)
    assert audit(parameter_groups(module, 0.1), module).splitlines() == [
        "group    tensors  parameters  weight decay  for example",
        "weights        1       1,200           0.1  0.weight",
        "norms          2          60             0  1.weight, 1.bias",
        "frozen         1          30   in no group  0.bias",
    ]


def test_the_audit_shows_names_without_wrappers():
    module = nn.ModuleDict({"block": torch.compile(nn.Linear(2, 2), backend="eager")})
    assert audit_rows(parameter_groups(module, 0.1), module)[0].examples == ["block.weight"]


def test_the_audit_accepts_the_groups_of_an_optimizer():
    module = Tiny()
    optimizer = torch.optim.AdamW(parameter_groups(module, 0.1))
    assert audit_rows(optimizer.param_groups, module) == audit_rows(parameter_groups(module, 0.1), module)


def test_a_parameter_in_no_group_or_in_two_is_refused():
    module = nn.Linear(2, 2)
    groups = [{"name": n, "params": [module.weight], "weight_decay": 0.0} for n in ("x", "y")]
    with pytest.raises(ValueError, match=r"parameter groups: weight in 2, bias in 0 groups; every trainable parameter"):
        audit_rows(groups, module)


def test_a_negative_weight_decay_is_refused():
    with pytest.raises(ValueError, match=r"weight_decay=-0.1: must be 0 or more\."):
        parameter_groups(nn.Linear(2, 2), -0.1)


def test_with_decay_of_norms_their_gains_are_decayed_and_nothing_else_of_theirs():
    module = Tiny()
    module.g = CosineScale(GPTConfig(qk_norm="l2"))
    groups = parameter_groups(module, 0.1, decay_norms=True)
    assert by_name(groups, module)["norms"] == ["b.weight", "d.weight"]
    assert by_name(groups, module)["norm_biases"] == ["b.bias", "g.scale"]
    decay = {group["name"]: group["weight_decay"] for group in groups}
    assert decay == {"weights": 0.1, "embeddings": 0.1, "norms": 0.1, "norm_biases": 0.0, "biases": 0.0}


def test_patterns_take_parameters_out_of_their_role():
    module = Tiny()
    patterns = {"*.weight": PatternOptions(lr_factor=0.5), "c.*": PatternOptions(weight_decay=0.7)}
    groups = parameter_groups(module, 0.1, patterns=patterns)
    assert by_name(groups, module) == {
        "weights": ["e"],
        "weights of *.weight": ["head.weight"],
        "weights of c.*": ["c.weight"],
        "embeddings of *.weight": ["a.weight"],
        "norms": ["b.bias"],
        "norms of *.weight": ["b.weight", "d.weight"],
        "biases": ["f"],
        "biases of c.*": ["c.bias"],
    }
    found = {group["name"]: (group["weight_decay"], group.get("lr_factor")) for group in groups}
    assert found["weights of *.weight"] == (0.1, 0.5)
    assert found["weights of c.*"] == (0.7, 1.0)
    assert found["norms of *.weight"] == (0.0, 0.5)
    assert found["biases of c.*"] == (0.7, 1.0)
    assert found["weights"] == (0.1, None)
    rows = {row.group: row.weight_decay for row in audit_rows(groups, module)}  # every parameter is in exactly one
    assert rows["weights of *.weight, lr x 0.5"] == 0.1
    assert rows["weights of c.*"] == 0.7


@pytest.mark.parametrize("patterns", [["b.c"], ["c.weight", "c.*"]], ids=["no such name", "all taken by the next"])
def test_a_pattern_that_is_left_with_nothing_is_refused_with_the_names_there_are(patterns):
    options = {pattern: PatternOptions(lr_factor=0.5) for pattern in patterns}
    with pytest.raises(ValueError, match=r"is left with no trainable parameter; the names are a\.weight, ") as error:
        parameter_groups(Tiny(), 0.1, patterns=options)
    assert str(error.value).startswith(f"optimizer.patterns.{patterns[0]}: ")


def test_a_pattern_sees_through_wrappers():
    module = nn.Sequential()
    module._orig_mod = nn.Linear(2, 2)
    groups = parameter_groups(module, 0.1, patterns={"weight": PatternOptions(lr_factor=0.5)})
    assert [group["name"] for group in groups] == ["weights of weight", "biases"]
