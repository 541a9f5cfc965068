"""The shape of a GPT, its options and what they may be."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, get_args

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.model import attention_options
from lit_stable.model.attention_options import AttentionOptions, attention_problems
from lit_stable.model.embedding_options import EmbeddingOptions, PositionKind, embedding_problems
from lit_stable.model.init_options import InitOptions, init_problems, named_std

NormKind = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post_sublayer", "sandwich", "normformer"]
NormGain = Literal["one", "zero_centred"]
MLPKind = Literal["gelu", "gelu_tanh", "relu", "swiglu"]

_LARGEST = 100_000_000  # of any side of a matrix: its bytes are a number of 64 bits
_MOST_LAYERS = 10_000  # each is built before it is counted
_SHAPE = ("vocab_size", "n_layer", "n_head", "d_model", "max_length")
_SWIGLU_MULTIPLE = 64  # matrix units want round sizes; 8/3 d_model seldom is one
_CHOICES: dict[str, Any] = {
    "norm": NormKind,
    "norm_position": NormPosition,
    "norm_gain": NormGain,
    "mlp": MLPKind,
    "position": PositionKind,
    **attention_options.CHOICES,
}


@judges_arguments(ValueError, "model.gpt")
@dataclass(frozen=True, repr=False)
class GPTConfig(AttentionOptions, EmbeddingOptions, InitOptions):
    """A decoder-only transformer, by default with the options of GPT-2 (Radford et al. 2019).

    Raises:
        ValueError: with one line per problem, all problems at once.

    Example::

        >>> GPTConfig(d_model=512, n_head=8, mlp="swiglu").hidden
        1408
    """

    vocab_size: int = 50304
    """Number of token ids; the default is GPT-2's 50257 padded to a multiple of 64."""

    n_layer: int = 12
    """Number of blocks."""

    n_head: int = 12
    """Number of attention heads; must divide d_model."""

    d_model: int = 768
    """Width of the residual stream."""

    d_ff: int | None = None
    """Width inside the MLP. null: 4 d_model; for swiglu 8/3 d_model, rounded up to a multiple of 64."""

    max_length: int = 1024
    """Longest sequence in tokens."""

    norm: NormKind = "layernorm"
    """Kind of all norms but those of queries and keys; statistics and gains are fp32 in every precision."""

    norm_eps: float = 1e-5
    """Added to the variance inside every norm."""

    norm_position: NormPosition = "pre"
    """Norms of a block. pre: of each sub-layer's input. post_sublayer: of its output instead (Swin v2, Chameleon,
    OLMo 2). sandwich: of both (CogView, Gemma 2). normformer: pre, and after attention, per head, and inside the MLP
    (Shleifer et al. 2021, arXiv:2110.09456). The norm before the head is always there."""

    norm_gain: NormGain = "one"
    """one: gains are stored as they are. zero_centred: as gain - 1, so that weight decay, if it is asked for, pulls
    them to 1, and 16 bits can hold small changes."""

    mlp: MLPKind = "gelu"
    """gelu: exact GELU (Hendrycks and Gimpel 2016). gelu_tanh: its tanh form, as in GPT-2 and Megatron-LM. relu.
    swiglu: SiLU-gated linear unit (Shazeer 2020), three matrices."""

    tied: bool = True
    """Share one matrix between token embedding and head."""

    head_fp32: bool = False
    """Compute the logits in fp32 from fp32 weights, whatever the precision of the blocks (BloombergGPT). Where training
    on CUDA computes in 16 bits, operands are rounded to 11 significant bits, as TF32 units do, and so are the gradients
    of the logits; sums, logits and losses are not."""

    logit_soft_cap: float | None = None
    """cap * tanh(logit / cap) on every logit, in fp32 (Gemma 2); null: none."""

    residual_fp32: bool = False
    """Keep the residual stream in fp32 between sub-layers, which still compute in the precision of the blocks."""

    bias: bool = False
    """Biases in linear layers and in layer norms. The head never has one."""

    dropout: float = 0.0
    """Probability, in [0, 1), of dropping embeddings, attention weights and sub-layer outputs; `embed_dropout`,
    `attention_dropout` and `residual_dropout` replace it one by one."""

    residual_dropout: float | None = None
    """Of sub-layer outputs; null: `dropout`."""

    def __post_init__(self) -> None:
        problems = [*self._choice_problems(), *self._size_problems(), *self._range_problems()]
        problems += attention_problems(self) + embedding_problems(self) + init_problems(self)
        if problems:
            raise ValueError("\n".join(problems))

    def __repr__(self) -> str:
        """The shape, then the options that are not at their default."""
        changed = [f.name for f in fields(self) if f.name not in _SHAPE and getattr(self, f.name) != _default(f)]
        return f"GPTConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in (*_SHAPE, *changed))})"

    @property
    def hidden(self) -> int:
        """Width inside the MLP, with the default resolved."""
        if self.d_ff is not None:
            return self.d_ff
        if self.mlp != "swiglu":
            return 4 * self.d_model
        return -(-8 * self.d_model // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, with the default resolved."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def std(self) -> float:
        """Standard deviation of initial weights as a number."""
        return named_std(self.init_std, self.d_model)

    def dropout_of(self, place: Literal["embed", "attention", "residual"]) -> float:
        """Dropout probability at one place, with the default resolved."""
        own: float | None = getattr(self, f"{place}_dropout")
        return self.dropout if own is None else own

    def _choice_problems(self) -> list[str]:
        return [
            f"model.gpt.{name}={getattr(self, name)!r}: must be one of {', '.join(get_args(kind))}."
            for name, kind in _CHOICES.items()
            if getattr(self, name) not in get_args(kind)
        ]

    def _size_problems(self) -> list[str]:
        sizes = [
            "vocab_size",
            "n_layer",
            "n_head",
            "d_model",
            "max_length",
            *(["d_ff"] if self.d_ff is not None else []),
        ]
        problems = [
            f"model.gpt.{name}={getattr(self, name)}: must be at least 1." for name in sizes if getattr(self, name) < 1
        ]
        problems += [
            f"model.gpt.{name}={getattr(self, name)}: must be at most {most:,}."
            for name in sizes
            if getattr(self, name) > (most := _MOST_LAYERS if name == "n_layer" else _LARGEST)
        ]
        if self.n_head < 1 or self.d_model < 1:
            return problems
        below, rest = divmod(self.d_model, self.n_head)
        if rest:
            legal = " and ".join(str(k * self.n_head) for k in (below, below + 1) if k)
            problems.append(
                f"model.gpt.d_model={self.d_model}: must be a multiple of n_head={self.n_head}; nearest legal: {legal}."
            )
        elif self.position == "rope" and self.head_size % 2:
            problems.append(
                f"model.gpt.n_head={self.n_head}: heads of d_model={self.d_model} have odd size {self.head_size}, and "
                "position=rope turns pairs; choose n_head so that d_model / n_head is even."
            )
        return problems

    def _range_problems(self) -> list[str]:
        positive = ["norm_eps", "rope_theta", *(["logit_soft_cap"] if self.logit_soft_cap is not None else [])]
        problems = [
            f"model.gpt.{name}={getattr(self, name)!r}: must be a finite number above 0."
            for name in positive
            if not 0 < getattr(self, name) < math.inf  # written so that NaN fails too
        ]
        for name in ("dropout", "embed_dropout", "attention_dropout", "residual_dropout"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                problems.append(f"model.gpt.{name}={rate}: must be at least 0 and below 1.")
        return problems


def _default(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[operator]
