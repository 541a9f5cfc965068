"""Options of attention: heads, what happens to queries, keys and scores, which tokens see each other."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lit_stable.model.config import GPTConfig

QKNormKind = Literal["none", "layernorm", "rmsnorm", "l2"]
ScaleKind = Literal["post", "pre_sqrt"]
LayerScaling = Literal["none", "megatron", "hf_inverse_layer"]
KernelChoice = Literal["auto", "explicit"]

CHOICES = {
    "qk_norm": QKNormKind,
    "attention_scale": ScaleKind,
    "qk_layer_scaling": LayerScaling,
    "attention_kernel": KernelChoice,
}


# Annotations are objects here, not text: the command line reads those of `GPTConfig` where `GPTConfig` stands.
@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The part of a `GPTConfig` that attention reads."""

    n_kv_head: int | None = None
    """Number of key and value heads, each shared by n_head / n_kv_head query heads (Ainslie et al. 2023). null: n_head,
    every query head has its own."""

    qk_norm: QKNormKind = "none"
    """Norm of each head's queries and keys: layernorm (Dehghani et al. 2023) or rmsnorm, with one gain for all heads of
    a layer; l2: unit length (Henry et al. 2020), the scores multiplied by `qk_l2_scale` instead of 1/sqrt(K)."""

    qk_l2_scale: float | Literal["learned"] = "learned"
    """Factor on the cosines under `qk_norm: l2`. learned: one number per layer that starts at
    log2(max_length^2 - max_length) (Henry et al. 2020, arXiv:2010.04245); a number stays what it is."""

    attention_scale: ScaleKind = "post"
    """Where 1/sqrt(K) goes: post, on the scores; pre_sqrt, its root on queries and on keys (OPT 11.10, tr8-104B Exp 3),
    so that a product in fp16 overflows later."""

    qk_layer_scaling: LayerScaling = "none"
    """megatron: queries divided by the layer's number before the product, scores multiplied by it in fp32: the same in
    exact arithmetic. hf_inverse_layer: divided and left so, as Hugging Face's scale_attn_by_inverse_layer_idx."""

    attention_soft_cap: float | None = None
    """cap * tanh(score / cap) on every scaled score, in fp32 (Gemma 2, arXiv:2408.00118); null: none."""

    attention_kernel: KernelChoice = "auto"
    """auto: the fastest that the other options allow. explicit: scores written out in the compute dtype, softmax in
    fp32, as before fused kernels; there alone `pre_sqrt` and `megatron` change what overflows."""

    attention_dropout: float | None = None
    """Of attention weights; null: `dropout`."""

    document_mask: bool = False
    """Tokens attend within their own document only; the end-of-document token belongs to the document it ends."""

    document_separator: int | None = None
    """Id of the end-of-document token; null: what the data module names (`eot_id`). Read with `document_mask` only."""

    reset_positions: bool = False
    """Count learned positions from the start of each document; needs `document_mask`."""


def attention_problems(config: "GPTConfig") -> list[str]:
    """What is wrong with the values and their combinations, one sentence each."""
    problems = _head_problems(config) + _score_problems(config)
    if config.reset_positions and not config.document_mask:
        problems.append("model.gpt.reset_positions=True: counts within documents; set document_mask: true as well.")
    if config.reset_positions and config.position != "learned":
        problems.append(
            f"model.gpt.reset_positions=True: position={config.position} sees distances only, which are the same within"
            " a document; set reset_positions: false."
        )
    separator = config.document_separator
    if separator is not None and not 0 <= separator < config.vocab_size:
        problems.append(
            f"model.gpt.document_separator={separator}: must be a token id below vocab_size={config.vocab_size}."
        )
    return problems


def _head_problems(config: "GPTConfig") -> list[str]:
    groups = config.n_kv_head
    if groups is None or config.n_head < 1:
        return []
    if groups < 1 or config.n_head % groups:
        legal = ", ".join(str(n) for n in range(1, config.n_head + 1) if config.n_head % n == 0)
        return [f"model.gpt.n_kv_head={groups}: must divide n_head={config.n_head}; legal are {legal}."]
    return []


def _score_problems(config: "GPTConfig") -> list[str]:
    problems = []
    cap, factor = config.attention_soft_cap, config.qk_l2_scale
    if cap is not None and not 0 < cap < math.inf:
        problems.append(f"model.gpt.attention_soft_cap={cap}: must be a finite number above 0, or null.")
    if factor != "learned" and (isinstance(factor, str) or not 0 < factor < math.inf):
        problems.append(f"model.gpt.qk_l2_scale={factor!r}: must be a finite number above 0 or learned.")
    if config.qk_norm == "l2" and config.attention_scale == "pre_sqrt":
        problems.append(
            "model.gpt.attention_scale=pre_sqrt: places 1/sqrt(K), which qk_norm=l2 replaces by qk_l2_scale; set it to"
            " post."
        )
    if config.qk_norm == "l2" and factor == "learned" and config.max_length < 3:
        problems.append(
            f"model.gpt.qk_l2_scale=learned: starts at log2(L^2 - L), which needs max_length={config.max_length} to be"
            " at least 3; give a number."
        )
    return problems
