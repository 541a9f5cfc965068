"""Closed forms for the size and the arithmetic of a GPT, exact for every option of `GPTConfig`."""

from __future__ import annotations

from lit_stable.model.config import GPTConfig, NormKind


def parameter_count(config: GPTConfig) -> int:
    """Number of parameters, a tied matrix counted once."""
    return sum(parameter_breakdown(config).values())


def parameter_breakdown(config: GPTConfig) -> dict[str, int]:
    """Number of parameters by part; parts that the options leave out have 0."""
    d, layers = config.d_model, config.n_layer
    norm = _norm_parameters(config.norm, d, config)
    biases = _projection_rows(config) + d, mlp_inputs(config) * config.hidden + d
    attention_bias, mlp_bias = biases if config.bias else (0, 0)
    normformer = config.norm_position == "normformer"
    inner_norm = _norm_parameters(config.norm, config.hidden, config)
    return {
        "token_embedding": config.vocab_size * d,
        "position_embedding": config.max_length * d if config.position == "learned" else 0,
        "embedding_norm": norm if config.has_embed_norm else 0,
        "attention": layers * (_attention_weights(config) + attention_bias),
        "qk_norms": layers * _qk_norm_parameters(config),
        "head_scales": layers * config.n_head if normformer else 0,
        "mlp": layers * (_mlp_weights(config) + mlp_bias),
        "mlp_inner_norms": layers * inner_norm if normformer else 0,
        "block_norms": layers * block_norms(config) * norm,
        "final_norm": norm,
        "head": 0 if config.tied else config.vocab_size * d,
    }


def flops_per_token(config: GPTConfig, length: int) -> int:
    """FLOPs of training on one token (forward and backward) in sequences of `length`, for model FLOPs utilisation.

    The convention of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L d T, a multiply-add being two, nothing
    recomputed, and the attention matrix counted whole although its upper triangle is masked, or more of it by a
    document mask. N are the weights that multiply something: the head counts, also when tied; embedding tables, norms
    and biases do not. One third of it is the forward pass.
    """
    d, layers = config.d_model, config.n_layer
    weights = layers * (_attention_weights(config) + _mlp_weights(config)) + config.vocab_size * d
    return 6 * weights + 12 * layers * d * length


def block_norms(config: GPTConfig) -> int:
    """Norms of width d_model in a block."""
    return {"pre": 2, "post_sublayer": 2, "sandwich": 4, "normformer": 3}[config.norm_position]


def mlp_inputs(config: GPTConfig) -> int:
    """Matrices that read the MLP's input: gate and up, or up."""
    return 2 if config.mlp == "swiglu" else 1


def _projection_rows(config: GPTConfig) -> int:
    return (config.n_head + 2 * config.kv_heads) * config.head_size


def _attention_weights(config: GPTConfig) -> int:
    return config.d_model * (_projection_rows(config) + config.d_model)


def _mlp_weights(config: GPTConfig) -> int:
    return (mlp_inputs(config) + 1) * config.d_model * config.hidden


def _qk_norm_parameters(config: GPTConfig) -> int:
    if config.qk_norm == "none":
        return 0
    if config.qk_norm == "l2":
        return 1 if config.qk_l2_scale == "learned" else 0
    return 2 * _norm_parameters(config.qk_norm, config.head_size, config)


def _norm_parameters(kind: NormKind, size: int, config: GPTConfig) -> int:
    return size * (2 if kind == "layernorm" and config.bias else 1)
