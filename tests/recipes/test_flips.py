"""No switch of a recipe is dead: each one, flipped at toy size, moves what the run computes or what it measures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from recipe_values import instantiated
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_stable.callbacks.eight_bit_layout import plan_states
from lit_stable.cli.trace import Row, trace
from lit_stable.data.mixture import Mixture
from lit_stable.data.reshuffle import as_reshuffles, settle
from lit_stable.model.gpt import GPT
from lit_stable.model.sharding import build_gpt
from lit_stable.optim.build import build_optimizer

#: What the toy is asked to do otherwise than the recipe: recipe, key, value, and the part that must move.
FLIPS: list[tuple[str, str, str, str]] = [
    ("bloomberggpt/v2.0", "model.gpt.embed_norm", "false", "shapes"),  # PA-1
    ("bloomberggpt/v2.0", "model.gpt.bias", "false", "shapes"),
    ("bloomberggpt/v2.0", "model.gpt.position", "learned", "shapes"),
    ("opt/11", "model.gpt.norm_position", "pre", "shapes"),
    ("sizes/llama_8b", "model.gpt.norm", "layernorm", "loss"),
    ("sizes/llama_8b", "model.gpt.mlp", "gelu", "shapes"),
    ("sizes/llama_8b", "model.gpt.tied", "true", "shapes"),
    ("sizes/llama_8b", "model.gpt.rope_theta", "100.0", "loss"),
    ("bloomberggpt/v2.0", "model.gpt.residual_rescale", "false", "weights"),  # PA-2
    ("bloomberggpt/v2.0", "model.gpt.init_std", "0.02", "weights"),
    ("tr8/exp11", "model.gpt.init_std", "0.02", "weights"),
    ("bloomberggpt/v2.0", "model.seed_init", "1", "weights"),
    ("tr8b_bitsandbytes/exp1", "model.gpt.stable_embedding", "false", "weights"),
    ("opt/11", "model.gpt.init_overrides", "{}", "weights"),
    ("opt/12", "model.gpt.mlp", "gelu", "loss"),
    ("opt/11", "model.gpt.embed_scale", "1.0", "loss"),
    ("tr8/exp03", "model.gpt.attention_scale", "post", "loss_in_16"),  # the same in exact arithmetic
    ("tr8/exp03", "model.gpt.qk_layer_scaling", "none", "loss_in_16"),
    ("bloomberggpt/v2.0", "model.gpt.head_fp32", "false", "loss_in_16"),
    ("opt/12", "model.gpt.dropout", "0.5", "loss"),
    ("opt/12", "model.gpt.attention_dropout", "0.5", "loss"),
    ("opt/12", "model.gpt.embed_dropout", "0.5", "loss"),
    ("bloomberggpt/v2.0", "model.schedule.peak", "1e-4", "trace"),  # PA-3
    ("bloomberggpt/v2.0", "model.schedule.floor", "1e-6", "trace"),
    ("bloomberggpt/v2.0", "model.schedule.warmup", "9", "trace"),
    ("bloomberggpt/v2.0", "model.schedule.horizon", "100", "trace"),
    ("opt/12", "model.schedule.shape", "cosine", "trace"),
    ("tr8b_curriculum/exp2", "model.schedule.warmup_unit", "steps", "trace"),
    ("tr8b_curriculum/exp2", "model.schedule.unit", "samples", "trace"),
    ("bloomberggpt/v2.0", "stability.batch_size_warmup", "null", "trace"),
    ("bloom/176b", "stability.batch_size_warmup.ramp", "[4, 2, 500]", "trace"),
    ("bloomberggpt/v2.0", "stability.grad_clip.max_norm", "1.0", "trace"),
    ("opt/11_clip", "stability.grad_clip.schedule", "null", "trace"),
    ("opt/12", "data.global_batch", "8", "trace"),
    ("tr8b_curriculum/exp1", "stability.sequence_length_warmup", "null", "trace"),
    ("tr8b_curriculum/exp1", "stability.sequence_length_warmup.total_steps", "20", "trace"),
    ("tr8b_bitsandbytes/exp6", "stability.lr_override", "null", "trace"),
    ("tr8b_bitsandbytes/exp6", "stability.lr_override.floor", "1e-5", "trace"),
    ("bloomberggpt/v2.1", "stability.lr_override.peak", "5e-5", "trace"),
    ("bloomberggpt/v2.6", "stability.lr_override.weight_decay", "0.05", "trace"),
    ("opt/12.43", "stability.lr_override.factor", "0.5", "trace"),
    ("tr8b_bitsandbytes/exp1_overflows", "stability.scripted_skip.schedule_on_skip", "advance", "trace"),
    ("tr8b_embed_norm/exp6", "stability.optimizer_reset", "null", "trace"),
    ("tr8b_embed_norm/exp7", "stability.optimizer_reset.hold_steps", "40", "trace"),
    ("tr8/exp04", "model.optimizer.betas", "[0.9, 0.999]", "update"),  # PA-4
    ("opt/11_gpt3", "model.optimizer.eps", "1e-2", "update"),
    ("opt/12", "model.optimizer.weight_decay", "0.5", "update"),
    ("bloomberggpt/v1.0", "model.optimizer.decay_norms", "false", "update"),
    ("opt/12_sgd", "model.optimizer.name", "adamw", "update"),
    ("bloomberggpt/v2.0", "data.seed_data", "1", "order"),  # PA-5
    ("bloomberggpt/v0", "data.order.by", "shuffle", "order"),
    ("bloomberggpt/v1.0", "data.order.by", "shuffle", "order"),
    ("bloomberggpt/v2.1", "data.order.reshuffle", "{}", "order"),
    ("tr8b_bitsandbytes/exp1", "stability.eight_bit_adam", "null", "states"),
]


#: One of two heads for keys and values; three layers, since in 16 bits a factor of two costs nothing.
TOYS = {"sizes/llama_8b": ["--model.gpt.n_kv_head", "1"], "tr8/exp03": ["--model.gpt.n_layer", "3"]}


@cache
def toy(name: str, *words: str) -> Any:
    configs = ["--config", name, "--config", "sizes/tiny", *TOYS.get(name, [])]
    return instantiated(*configs, *words)


@pytest.mark.parametrize(("name", "key", "value", "part"), FLIPS)
def test_a_flipped_value_moves_what_it_is_for(name, key, value, part):
    assert PARTS[part](toy(name)) != PARTS[part](toy(name, f"--{key}", value))
    assert PARTS[part](toy(name)) == PARTS[part](toy(name)), "moves by itself"


def _trace(parts: Any) -> list[Row]:
    features = [copy.copy(feature) for feature in vars(parts.stability).values() if feature]
    for feature in features:
        if hasattr(feature, "adopt"):
            feature.adopt(parts.data)
    model, data = parts.model, parts.data
    decay = model.optimizer_options.weight_decay
    return list(trace(model.schedule, decay, data.global_batch, data.sequence_length, features, 120))


def _order(parts: Any) -> list[list[int]]:
    """Source and window of the first samples, of sources of 40,000 windows each."""
    data = parts.data
    settled = settle(data.order.reshuffle, [], data.samples_before, 0, ())
    weights = [source.weight for source in data.sources.values()]
    sizes = [40_000] * len(weights)
    mixture = Mixture(list(data.sources), weights, sizes, data.seed_data, data.order, as_reshuffles(settled))
    return [part.tolist() for part in mixture.locate(np.arange(1800))]


def _states(parts: Any) -> list[str]:
    feature = parts.stability.eight_bit_adam
    return [] if feature is None else [str(plan) for plan in plan_states(_gpt(parts), feature.rules).values()]


def _gpt(parts: Any) -> GPT:
    return build_gpt(parts.model.config, seed=parts.model.seed_init, device=torch.device("cpu"), compile="off")


def _shapes(parts: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _gpt(parts).named_parameters()}


def _sums(gpt: GPT) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in gpt.state_dict().items()}


def _loss(gpt: GPT) -> Tensor:
    tokens = torch.arange(2 * 32).reshape(2, 32) % gpt.config.vocab_size
    torch.manual_seed(0)
    return cross_entropy(gpt(tokens).flatten(0, 1).float(), tokens.flatten())


def _loss_in_16(parts: Any) -> float:
    parts.model.config = replace(parts.model.config, attention_kernel="explicit")
    gpt = _gpt(parts)
    for parameter in gpt.parameters():
        parameter.data.mul_(3)  # scores large enough for their rounding to show
    with torch.autocast("cpu", torch.bfloat16):
        return _loss(gpt).item()


def _update(parts: Any) -> dict[str, float]:
    gpt = _gpt(parts)
    optimizer = build_optimizer(gpt, parts.model.optimizer_options, 0.1)
    for _ in range(2):
        _loss(gpt).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _sums(gpt)


PARTS: dict[str, Callable[[Any], Any]] = {
    "trace": _trace,
    "order": _order,
    "states": _states,
    "shapes": _shapes,
    "weights": lambda parts: _sums(_gpt(parts)),
    "loss": lambda parts: _loss(_gpt(parts)).item(),
    "loss_in_16": _loss_in_16,
    "update": _update,
}
