"""Whether a checkpoint's weights mean in this model what they meant in theirs.

Many options leave no trace in names and shapes: read into a model with other heads, other positions or gains stored
otherwise, all weights fit and compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lit_stable.model.config import GPTConfig
from lit_stable.model.insertion import MAY_CHANGE_WITH, has_norm, is_swap

# What a run may change on its way: what is done while training, how weights once began, and what only adds or bounds.
_FREE = {
    *("dropout", "embed_dropout", "attention_dropout", "residual_dropout", "embed_grad_shrink"),
    *("init_std", "residual_rescale", "init_overrides", "stable_embedding"),
    *("attention_kernel", "attention_scale", "residual_fp32", "head_fp32", "norm_eps", "max_length", "rope_theta"),
    *("attention_soft_cap", "logit_soft_cap", "document_mask", "document_separator", "reset_positions"),
}
# What names and shapes of weights tell; whoever reads the checkpoint compares them with more to say.
_IN_SHAPES = {"vocab_size", "n_layer", "d_model", "d_ff"}


def model_record(config: GPTConfig) -> dict[str, Any]:
    """All options as plain data for a checkpoint, with defaults that follow from others resolved."""
    groups = None if config.kv_heads == config.n_head else config.kv_heads
    return {**asdict(config), "n_kv_head": groups, "embed_norm": config.has_embed_norm}


def model_changes(
    config: GPTConfig, stored: Mapping[str, Any], operated: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """What differs between a model and the record of another: sentences of refusal, and lines about what may differ.

    Sizes that are seen in shapes are left out.

    An option that the record does not know was not there: its weights were trained with the default. What is
    ``operated`` on, on purpose, may differ.
    """
    free = _FREE.union(*(MAY_CHANGE_WITH[what] for what in operated))
    known = {**model_record(GPTConfig()), **stored}
    changed = {name: value for name, value in model_record(config).items() if _plain(known[name]) != _plain(value)}
    problems = [
        f"model.gpt.{name}={value}: the checkpoint is of a model with {known[name]}, and its weights would mean"
        f" something else here; set it back,{_remedy(name, value, known)} or begin a new run."
        for name, value in changed.items()
        if name not in free | _IN_SHAPES and not _neutral(name, known[name], value)
    ]
    lines = [f"gpt.{name} {known[name]} -> {value} (recipe)" for name, value in changed.items() if name in free]
    return problems, lines


def _remedy(name: str, value: Any, stored: Mapping[str, Any]) -> str:
    if name == "mlp" and is_swap(stored[name], value):
        return " swap it by surgery: {swap: [activation]},"
    can_be_inserted = name in ("qk_norm", "embed_norm") and not has_norm(name, stored)
    return f" insert the norm by surgery: {{insert: [{name}]}}," if can_be_inserted else ""


def _neutral(name: str, old: Any, new: Any) -> bool:
    # Megatron's form divides and multiplies again.
    return name == "qk_layer_scaling" and {old, new} == {"none", "megatron"}


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
