"""Which models of `transformers` a GPT is one of: what each family can say, and its config.json.

`transformers` is not needed for any of it: names and values are those of its configuration files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lit_stable.model.config import GPTConfig

FamilyName = Literal["gpt2", "opt", "bloom", "llama"]

# Options that decide how weights begin, what training does, and in which precision: a trained model does not have them.
# Layer scaling in Megatron's form, and the place of the attention scale, change nothing in exact arithmetic.
_NOT_OF_A_TRAINED_MODEL = {
    *("dropout", "embed_dropout", "attention_dropout", "residual_dropout", "embed_grad_shrink", "document_mask"),
    *("document_separator", "reset_positions", "init_std", "residual_rescale", "init_overrides", "stable_embedding"),
    *("attention_kernel", "attention_scale", "residual_fp32", "head_fp32", "qk_l2_scale"),
}
_GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}  # by their names there


@dataclass(frozen=True)
class Family:
    """One architecture of `transformers`."""

    name: FamilyName
    architecture: str
    needs: Mapping[str, tuple[Any, ...]]
    """Values that an option must have, by option; one that is neither here nor in ``free`` must be at its default."""
    free: frozenset[str]
    """Options that it can say in any value."""
    settings: Callable[[GPTConfig], dict[str, Any]]
    """Its config.json, but for what all have."""
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From its config.json to options of a GPT; what is missing there has the default of `transformers`."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Settings of its config.json that have a counterpart here in these values alone; the first is the default."""


_SIZES = {"vocab_size", "n_layer", "n_head", "d_model", "max_length"}
_DENSE = frozenset({*_SIZES, "d_ff", "tied", "bias", "norm_eps", "norm_gain"})

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {"mlp": tuple(_GELU), "qk_layer_scaling": ("none", "megatron", "hf_inverse_layer")},
    _DENSE,
    lambda c: {
        **{"n_embd": c.d_model, "n_layer": c.n_layer, "n_head": c.n_head, "n_positions": c.max_length},
        **{"n_inner": c.hidden, "activation_function": _GELU[c.mlp], "layer_norm_epsilon": c.norm_eps},
        "scale_attn_by_inverse_layer_idx": c.qk_layer_scaling == "hf_inverse_layer",
        **{"resid_pdrop": c.dropout_of("residual"), "embd_pdrop": c.dropout_of("embed")},
        "attn_pdrop": c.dropout_of("attention"),
    },
    lambda s: {
        **{"d_model": s.get("n_embd", 768), "n_layer": s.get("n_layer", 12), "n_head": s.get("n_head", 12)},
        **{"max_length": s.get("n_positions", 1024), "d_ff": s.get("n_inner")},
        **{"mlp": _activation(s.get("activation_function", "gelu_new")), "norm_eps": s.get("layer_norm_epsilon", 1e-5)},
        "qk_layer_scaling": "hf_inverse_layer" if s.get("scale_attn_by_inverse_layer_idx") else "none",
        **{"vocab_size": s.get("vocab_size", 50257), "tied": s.get("tie_word_embeddings", True)},
    },
    {"scale_attn_weights": (True,), "add_cross_attention": (False,)},
)

OPT = Family(
    "opt",
    "OPTForCausalLM",
    {"mlp": ("relu", "gelu", "gelu_tanh"), "norm_eps": (1e-5,)},
    _DENSE - {"norm_eps"},
    lambda c: {
        **{"hidden_size": c.d_model, "word_embed_proj_dim": c.d_model, "num_hidden_layers": c.n_layer},
        **{"num_attention_heads": c.n_head, "ffn_dim": c.hidden, "max_position_embeddings": c.max_length},
        **{"activation_function": _GELU[c.mlp], "do_layer_norm_before": True, "enable_bias": c.bias},
        **{"dropout": c.dropout_of("residual"), "attention_dropout": c.dropout_of("attention")},
    },
    lambda s: {
        **{"d_model": s.get("hidden_size", 768), "n_layer": s.get("num_hidden_layers", 12)},
        **{"n_head": s.get("num_attention_heads", 12), "d_ff": s.get("ffn_dim", 3072)},
        **{"max_length": s.get("max_position_embeddings", 2048), "vocab_size": s.get("vocab_size", 50272)},
        "mlp": _activation(s.get("activation_function", "relu")),
        "tied": s.get("tie_word_embeddings", True),
    },
    {
        **{"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,)},
        "layer_norm_elementwise_affine": (True,),
    },
)

BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    {"position": ("alibi",), "embed_norm": (True,), "mlp": ("gelu_tanh",)},
    _DENSE,
    lambda c: {
        **{"hidden_size": c.d_model, "n_layer": c.n_layer, "n_head": c.n_head, "seq_length": c.max_length},
        **{"layer_norm_epsilon": c.norm_eps, "hidden_dropout": c.dropout_of("residual")},
        **{"attention_dropout": c.dropout_of("attention"), "apply_residual_connection_post_layernorm": False},
    },
    lambda s: {
        **{"position": "alibi", "embed_norm": True, "mlp": "gelu_tanh"},
        **{
            "d_model": s.get("hidden_size", s.get("n_embed", 64)),
            "n_layer": _either(s, "n_layer", "num_hidden_layers", 2),
        },
        "n_head": _either(s, "n_head", "num_attention_heads", 8),
        **{"max_length": s.get("seq_length", 2048), "norm_eps": s.get("layer_norm_epsilon", 1e-5)},
        **{"vocab_size": s.get("vocab_size", 250880), "tied": s.get("tie_word_embeddings", True)},
    },
    {"apply_residual_connection_post_layernorm": (False,)},
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    {"position": ("rope",), "norm": ("rmsnorm",), "mlp": ("swiglu",)},
    _DENSE | {"n_kv_head", "rope_theta"},
    lambda c: {
        **{"hidden_size": c.d_model, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head},
        **{"num_key_value_heads": c.kv_heads, "head_dim": c.head_size, "intermediate_size": c.hidden},
        **{"max_position_embeddings": c.max_length, "rms_norm_eps": c.norm_eps, "hidden_act": "silu"},
        # Twice, as versions before and from 5 on read it.
        **{"rope_theta": c.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}},
        **{"attention_bias": c.bias, "mlp_bias": c.bias, "attention_dropout": c.dropout_of("attention")},
    },
    lambda s: {
        **{"position": "rope", "norm": "rmsnorm", "mlp": "swiglu"},
        **{"d_model": s.get("hidden_size", 4096), "n_layer": s.get("num_hidden_layers", 32)},
        **{"n_head": s.get("num_attention_heads", 32), "n_kv_head": s.get("num_key_value_heads")},
        **{"d_ff": s.get("intermediate_size", 11008), "max_length": s.get("max_position_embeddings", 2048)},
        "norm_eps": s.get("rms_norm_eps", 1e-6),
        "rope_theta": (s.get("rope_parameters") or {}).get("rope_theta", s.get("rope_theta", 10000.0)),
        **{"vocab_size": s.get("vocab_size", 32000), "tied": s.get("tie_word_embeddings", False)},
    },
    {"hidden_act": ("silu",), "rope_scaling": (None, {"rope_type": "default"})},
)

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, OPT, BLOOM, LLAMA)}


def closest_family(config: GPTConfig) -> Family:
    """The family that a model's positions point to; of those with learned ones OPT is the one with ReLU."""
    by_position = {"rope": LLAMA, "alibi": BLOOM, "learned": OPT if config.mlp == "relu" else GPT2}
    return by_position[config.position]


def export_problems(config: GPTConfig, family: Family) -> list[str]:
    """One sentence for each option that a family has no counterpart of."""
    default, problems = GPTConfig(), []
    for name in GPTConfig.__dataclass_fields__:
        value = config.has_embed_norm if name == "embed_norm" else getattr(config, name)
        allowed = family.needs.get(name, (getattr(default, name),))
        if name == "n_kv_head" and value == config.n_head:  # groups of one head are no groups
            continue
        if name == "qk_layer_scaling":
            allowed = (*allowed, "megatron")
        if name in family.free | _NOT_OF_A_TRAINED_MODEL or value in allowed:
            continue
        if name == "rope_theta" and config.position != "rope":
            continue
        options = " or ".join(str(one) for one in allowed)
        problems.append(
            f"model.gpt.{name}={value}: has no counterpart in {family.architecture} of transformers, which is"
            f" {options}; it cannot be exported as that."
        )
    if family is BLOOM and config.hidden != 4 * config.d_model:
        problems.append(
            f"model.gpt.d_ff={config.hidden}: has no counterpart in {family.architecture} of transformers, which is"
            f" 4 x d_model = {4 * config.d_model}; it cannot be exported as that."
        )
    return problems


def import_problems(settings: Mapping[str, Any]) -> list[str]:
    """One sentence for each setting of a config.json that a GPT has no counterpart of."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in get_args(FamilyName):
        return [f"model_type={kind}: is none of {', '.join(get_args(FamilyName))}, which are read."]
    family = FAMILIES[kind]
    found = {name: settings.get(name, allowed[0]) for name, allowed in family.fixed.items()}
    problems = [
        f"{name}={value}: has no counterpart here, where it is {family.fixed[name][0]}."
        for name, value in found.items()
        if value not in family.fixed[name]
    ]
    width = settings.get("hidden_size", {"opt": 768, "llama": 4096}.get(kind))
    if kind == "opt" and settings.get("word_embed_proj_dim", width) != width:
        problems.append(f"word_embed_proj_dim={settings['word_embed_proj_dim']}: is not hidden_size={width}.")
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_parameters.rope_type={rope['rope_type']}: has no counterpart here, where it is default.")
    if kind == "llama":
        heads = settings.get("num_attention_heads", 32)
        size = settings.get("head_dim") or width / heads
        if size * heads != width or width % heads:
            problems.append(f"head_dim={size:g}: must be a whole number, hidden_size={width} / {heads} heads.")
    name = settings.get("activation_function")
    if name is not None and kind in ("gpt2", "opt") and _activation(name) is None:
        problems.append(f"activation_function={name}: has no counterpart here; known are {', '.join(_ACTIVATIONS)}.")
    return problems


_ACTIVATIONS = {
    **{"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    "gelu_fast": "gelu_tanh",
}


def _activation(name: str) -> str | None:
    return _ACTIVATIONS.get(name)


def _either(settings: Mapping[str, Any], first: str, second: str, default: int) -> int:
    return int(settings.get(first, settings.get(second, default)))
