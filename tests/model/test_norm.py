"""Norms: fp32 inside whatever comes in, and recognised by type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.callbacks.module_patterns import import_types, norm_parameter_names
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.norm import LayerNorm, RMSNorm, build_norm, is_norm_or_gain, sublayer_norms
from lit_stable.model.sharding import norm_parameters


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("autocast", [False, True])
def test_statistics_and_gain_are_fp32_for_bf16_input(kind, autocast):
    torch.manual_seed(0)
    norm = build_norm(kind, 256, GPTConfig())
    nn.init.uniform_(norm.weight, 0.9, 1.1)
    x = (100 + torch.randn(64, 256)).bfloat16()
    function = F.layer_norm if kind == "layernorm" else F.rms_norm
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, function(x.float(), (256,), weight=norm.weight, eps=1e-5).bfloat16())
    # Rounded gains would be seen: the check above can fail.
    assert not torch.equal(y, function(x.float(), (256,), weight=norm.weight.bfloat16().float(), eps=1e-5).bfloat16())


def test_layernorm_by_hand():
    norm = build_norm("layernorm", 2, GPTConfig(bias=True, norm_eps=1e-12))
    nn.init.constant_(norm.weight, 3.0)
    nn.init.constant_(norm.bias, 0.5)
    torch.testing.assert_close(norm(torch.tensor([5.0, 9.0])), torch.tensor([-2.5, 3.5]))


def test_rmsnorm_has_no_bias_and_keeps_the_mean():
    norm = build_norm("rmsnorm", 2, GPTConfig(bias=True, norm_eps=1e-12))
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 12.5**0.5)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_zero_centred_gains_are_stored_less_one(kind):
    torch.manual_seed(0)
    x, gains = torch.randn(5, 8), 1 + torch.randn(8)
    plain, centred = (build_norm(kind, 8, GPTConfig(norm_gain=gain)) for gain in ("one", "zero_centred"))
    plain.weight.data, centred.weight.data = gains, gains - 1
    torch.testing.assert_close(centred(x), plain(x))


def test_zero_centred_gains_in_bf16_hold_steps_that_gains_of_one_lose():
    step = 2.0**-12
    plain, centred = (
        build_norm("rmsnorm", 4, GPTConfig(norm_gain=gain)).bfloat16() for gain in ("one", "zero_centred")
    )
    plain.weight.data.fill_(1.0).add_(step)
    centred.weight.data.fill_(0.0).add_(step)
    assert [norm(torch.ones(4)).max().item() for norm in (plain, centred)] == pytest.approx([1.0, 1 + step], abs=1e-5)


@pytest.mark.parametrize(
    ("place", "attention", "mlp"),
    [
        ("pre", "before", "before"),
        ("post_sublayer", "after", "after"),
        ("sandwich", "before after", "before after"),
        ("normformer", "before after", "before"),
    ],
)
def test_norms_of_a_sublayer_by_position(place, attention, mlp):
    for sublayer, expected in (("attention", attention), ("mlp", mlp)):
        before, after = sublayer_norms(GPTConfig(norm_position=place), sublayer)
        found = [name for name, norm in (("before", before), ("after", after)) if is_norm_or_gain(norm)]
        assert " ".join(found) == expected


def test_norms_are_known_by_type():
    norms = [LayerNorm(4), RMSNorm(4), nn.LayerNorm(4), nn.RMSNorm(4)]
    assert all(map(is_norm_or_gain, norms))
    assert not any(map(is_norm_or_gain, [nn.Linear(4, 4), nn.Embedding(4, 4), nn.Identity()]))


def test_for_callbacks_gains_that_normalise_nothing_are_no_norms():
    """Freezing, and what `WeightMonitor` calls a gain, go by `module_patterns.is_norm`: no other difference."""
    gpt = GPT(
        GPTConfig(n_layer=1, n_head=2, d_model=8, vocab_size=8, max_length=4, norm_position="normformer", qk_norm="l2")
    )
    kept = {name for name, p in gpt.named_parameters() if p in norm_parameters(gpt)}
    gains = {n for n in kept if "scale" in n}
    assert gains == {"blocks.0.attention.head_scale.weight", "blocks.0.attention.qk_scale.scale"}
    assert norm_parameter_names(gpt) == kept - gains
    assert norm_parameter_names(gpt, import_types(["lit_stable.model.norm.Gain"])) == kept
    assert all(parameter.ndim == 1 for name, parameter in gpt.named_parameters() if name in gains)  # never in 8 bit
