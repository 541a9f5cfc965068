"""What is kept in 8 bit, and what that takes."""

from __future__ import annotations

import pytest
import torch
from eight_bit_models import EIGHT_BIT, Kinds
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_layout import StateRules, eight_bit_bytes, plan_states, saving, state_table
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT


def why(module: nn.Module, **rules: object) -> dict[str, str]:
    return {plan.name: plan.why for plan in plan_states(module, StateRules(**rules)).values()}  # type: ignore[arg-type]


def test_only_matrices_outside_embeddings_and_norms_are_kept_in_8_bit() -> None:
    found = why(Kinds(), min_8bit_size=1)
    assert sorted(name for name, reason in found.items() if reason == "8 bit") == sorted(EIGHT_BIT)
    assert found["embedding.weight"] == "embedding"
    assert found["norm.weight"] == found["norm.bias"] == "norm"
    assert found["even.bias"] == "bias or vector"


def test_a_head_tied_to_an_embedding_is_one_whichever_comes_first() -> None:
    for order in (("head", "table"), ("table", "head")):
        module = nn.ModuleDict({n: nn.Linear(64, 64) if n == "head" else nn.Embedding(64, 64) for n in order})
        module["head"].weight = module["table"].weight
        assert set(why(module, min_8bit_size=1).values()) == {"embedding", "bias or vector"}
        assert "8 bit" in why(module, min_8bit_size=1, embedding_bits=8).values()


def test_an_embedding_whose_weight_is_computed_from_others_is_one() -> None:
    """Weight normalization keeps a direction and a length inside the embedding; a tied head has the same tensor."""
    normed = nn.utils.parametrizations.weight_norm(nn.Embedding(64, 64))
    assert why(normed, min_8bit_size=1) == {
        "parametrizations.weight.original0": "embedding",
        "parametrizations.weight.original1": "embedding",
    }
    module = nn.ModuleDict({"head": nn.Linear(64, 64, bias=False), "table": nn.Embedding(64, 64)})
    module["head"].weight = module["table"].weight
    for part in module.values():
        nn.utils.parametrize.register_parametrization(part, "weight", nn.Identity())
    assert why(module, min_8bit_size=1) == {"head.parametrizations.weight.original": "embedding"}
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    assert why(linear, min_8bit_size=1)["parametrizations.weight.original1"] == "8 bit"
    norm = nn.utils.parametrizations.weight_norm(nn.LayerNorm((64, 64)))
    assert why(norm, min_8bit_size=1)["parametrizations.weight.original1"] == "norm"


def test_wrappers_change_no_choice_and_no_name() -> None:
    module = nn.ModuleDict({"table": nn.Embedding(64, 64), "inner": nn.Linear(64, 64), "head": nn.Linear(64, 64)})
    module["head"].weight = module["table"].weight
    found = why(module, min_8bit_size=1)
    module["table"] = checkpoint_wrapper(module["table"])
    module["inner"] = torch.compile(module["inner"])
    module["head"] = torch.compile(checkpoint_wrapper(module["head"]))
    assert "table._checkpoint_wrapped_module.weight" in dict(module.named_parameters())
    assert (
        why(module, min_8bit_size=1)
        == found
        == {
            **{"table.weight": "embedding", "inner.weight": "8 bit"},
            **dict.fromkeys(["inner.bias", "head.bias"], "bias or vector"),
        }
    )


def test_small_tensors_and_short_rows_stay_in_32_bit() -> None:
    module = nn.ParameterList([torch.ones(64, 64), torch.ones(63, 65), torch.ones(2000, 3), torch.ones(2000, 4)])
    assert list(why(module).values()) == ["8 bit", "small", "short rows", "8 bit"]
    assert list(why(module, min_8bit_size=4095).values())[1] == "8 bit"


def test_modules_can_be_named_and_a_pattern_that_selects_nothing_is_refused() -> None:
    assert why(Kinds(), min_8bit_size=1, keep_32_bit=("o*",)) | {
        "odd.weight": "keep_32_bit",
        "one.weight": "keep_32_bit",
    } == (why(Kinds(), min_8bit_size=1, keep_32_bit=("o*",)))
    with pytest.raises(MisconfigurationException, match="pattern 'head': matches no module"):
        plan_states(Kinds(), StateRules(keep_32_bit=("head",)))


def test_all_in_32_bit() -> None:
    assert set(why(Kinds(), bits=32, min_8bit_size=1).values()) == {"bits=32"}


def test_bytes_are_two_codes_an_element_and_two_maxima_a_block_of_a_row() -> None:
    assert eight_bit_bytes(torch.empty(10, 512)) == 10 * (2 * 512 + 2 * 2 * 4)
    assert eight_bit_bytes(torch.empty(10, 600)) == 10 * (2 * 600 + 2 * 3 * 4)
    assert eight_bit_bytes(torch.empty(3, 20, 30)) == 3 * (2 * 600 + 2 * 3 * 4)
    assert eight_bit_bytes(torch.empty(512, 768)) / (512 * 768) == 2 + 8 / 256  # the 2.03 that are quoted


def test_gpt2_small_saves_half_not_three_quarters() -> None:
    """50,257 tokens and biases, as published: 995 MB of moments become 488."""
    with torch.device("meta"):
        gpt = GPT(GPTConfig(vocab_size=50257, bias=True))
    plans = list(plan_states(gpt, StateRules()).values())
    assert sum(8 * plan.parameters for plan in plans) / 1e6 == pytest.approx(995.5, abs=0.1)
    assert sum(plan.num_bytes for plan in plans) / 1e6 == pytest.approx(488, abs=1)
    assert saving(plans) == pytest.approx(0.51, abs=0.005)
    in_8_bit = plan_states(gpt, StateRules(embedding_bits=8)).values()
    assert sum(plan.num_bytes for plan in in_8_bit) / 1e6 == pytest.approx(253, abs=1)


def test_the_table_says_how_much_and_why() -> None:
    table = state_table(plan_states(Kinds(), StateRules(min_8bit_size=1)).values()).splitlines()
    assert table[0].split()[0] == "state"
    # `even.weight` has rows of 512; `odd`, `short`, `one` and the experts have others.
    assert [line.split("  ")[0] for line in table[1:3]] == ["8 bit", "8 bit: last block short"]
    assert [line.split()[-4] for line in table[1:3]] == ["1", "4"]
    assert [line.split("  ")[0] for line in table[3:-2]] == [
        "32 bit: bias or vector",
        "32 bit: embedding",
        "32 bit: norm",
    ]
    plans = list(plan_states(Kinds(), StateRules(min_8bit_size=1)).values())
    assert table[-2].split() == [
        "all",
        str(len(plans)),
        f"{sum(p.numel() for p in Kinds().parameters()):,}",
        f"{sum(plan.num_bytes for plan in plans):,}",
        f"{sum(plan.num_bytes for plan in plans) / sum(plan.parameters for plan in plans):.3f}",
    ]
    assert table[-1] == f"{saving(plans):.1%} less than moments in 32 bit"
    assert saving([]) == 0.0
