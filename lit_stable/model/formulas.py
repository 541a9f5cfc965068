"""Closed forms for the size and the arithmetic of a GPT, exact for every option of `GPTConfig`."""

from __future__ import annotations

from lit_stable.model.config import GPTConfig, NormKind


def parameter_count(config: GPTConfig) -> int:
    """Number of parameters, a tied matrix counted once."""
    return sum(parameter_breakdown(config).values())


def parameter_breakdown(config: GPTConfig) -> dict[str, int]:
    """Number of parameters by part; parts that the options leave out have 0."""
    d, layers = config.d_model, config.n_layer
    qk_norms = 0 if config.qk_norm == "none" else 2 * _norm_parameters(config.qk_norm, config.head_size, config)
    norm = _norm_parameters(config.norm, d, config)
    attention_bias, mlp_bias = (4 * d, _mlp_inputs(config) * config.hidden + d) if config.bias else (0, 0)
    return {
        "token_embedding": config.vocab_size * d,
        "position_embedding": config.max_length * d if config.position == "learned" else 0,
        "embedding_norm": norm if config.embed_norm else 0,
        "attention": layers * (4 * d * d + attention_bias),
        "qk_norms": layers * qk_norms,
        "mlp": layers * (_mlp_weights(config) + mlp_bias),
        "block_norms": layers * 2 * norm,
        "final_norm": norm,
        "head": 0 if config.tied else config.vocab_size * d,
    }


def flops_per_token(config: GPTConfig, length: int) -> int:
    """FLOPs of training on one token (forward and backward) in sequences of `length`, for model FLOPs utilisation.

    The convention of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L d T, a multiply-add being two, nothing
    recomputed, and the attention matrix counted whole although its upper triangle is masked. N are the weights that
    multiply something: the head counts, also when tied; embedding tables, norms and biases do not. One third of it
    is the forward pass.
    """
    d, layers = config.d_model, config.n_layer
    weights = layers * (4 * d * d + _mlp_weights(config)) + config.vocab_size * d
    return 6 * weights + 12 * layers * d * length


def _mlp_inputs(config: GPTConfig) -> int:
    return 2 if config.mlp == "swiglu" else 1  # gate and up, or up


def _mlp_weights(config: GPTConfig) -> int:
    return (_mlp_inputs(config) + 1) * config.d_model * config.hidden


def _norm_parameters(kind: NormKind, size: int, config: GPTConfig) -> int:
    return size * (2 if kind == "layernorm" and config.bias else 1)
