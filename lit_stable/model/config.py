"""The shape of a GPT, its options and what they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

NormKind = Literal["layernorm", "rmsnorm"]
MLPKind = Literal["gelu", "swiglu"]
PositionKind = Literal["learned", "rope"]
QKNormKind = Literal["none", "layernorm", "rmsnorm"]

_SWIGLU_MULTIPLE = 64  # matrix units want round sizes; 8/3 d_model seldom is one


@dataclass(frozen=True)
class GPTConfig:
    """A pre-norm decoder-only transformer, by default with the options of GPT-2 (Radford et al. 2019).

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
    """Width inside the MLP. null: 4 d_model for gelu; 8/3 d_model, rounded up to a multiple of 64, for swiglu."""

    max_length: int = 1024
    """Longest sequence in tokens."""

    norm: NormKind = "layernorm"
    """Norm before each sub-layer and before the head; statistics and gains are fp32 in every precision."""

    norm_eps: float = 1e-5
    """Added to the variance inside every norm."""

    mlp: MLPKind = "gelu"
    """gelu: exact GELU. swiglu: SiLU-gated linear unit (Shazeer 2020), three matrices."""

    position: PositionKind = "learned"
    """learned: a table added to the token embedding. rope: rotary phases in attention (Su et al. 2021)."""

    rope_theta: float = 10000.0
    """Base of the rotary wavelengths; read with `position: rope` only."""

    qk_norm: QKNormKind = "none"
    """Norm of each head's queries and keys, one gain for all heads of a layer (Dehghani et al. 2023)."""

    embed_norm: bool = False
    """Norm of the token embedding before positions are added, as in BLOOM and BloombergGPT."""

    tied: bool = True
    """Share one matrix between token embedding and head."""

    head_fp32: bool = False
    """Compute the logits in fp32 from fp32 weights, whatever the precision of the blocks (BloombergGPT)."""

    bias: bool = False
    """Biases in linear layers and in layer norms. The head never has one."""

    dropout: float = 0.0
    """Probability, in [0, 1), of dropping embeddings, attention weights and sub-layer outputs."""

    init_std: float | Literal["small_init"] = 0.02
    """Standard deviation of initial weights. small_init: sqrt(2 / (5 d_model)) (Nguyen and Salazar 2019)."""

    residual_rescale: bool = True
    """Divide the initial std of both output projections of a block by sqrt(2 n_layer) (GPT-2, Megatron-LM)."""

    def __post_init__(self) -> None:
        problems = [*self._choice_problems(), *self._size_problems(), *self._range_problems()]
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def hidden(self) -> int:
        """Width inside the MLP, with the default resolved."""
        if self.d_ff is not None:
            return self.d_ff
        if self.mlp == "gelu":
            return 4 * self.d_model
        return -(-8 * self.d_model // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_head

    @property
    def std(self) -> float:
        """Standard deviation of initial weights as a number."""
        return math.sqrt(2 / (5 * self.d_model)) if self.init_std == "small_init" else float(self.init_std)

    def _choice_problems(self) -> list[str]:
        choices = {"norm": NormKind, "mlp": MLPKind, "position": PositionKind, "qk_norm": QKNormKind}
        return [
            f"model.gpt.{name}={getattr(self, name)!r}: must be one of {', '.join(get_args(kind))}."
            for name, kind in choices.items()
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
        positive = ["norm_eps", "rope_theta", *(["init_std"] if self.init_std != "small_init" else [])]
        problems = []
        for name in positive:
            value = getattr(self, name)
            # Written so that NaN fails too.
            if isinstance(value, str) or not 0 < value < math.inf:
                remedy = " or small_init" if name == "init_std" else ""
                problems.append(f"model.gpt.{name}={value!r}: must be a finite number above 0{remedy}.")
        if not 0 <= self.dropout < 1:
            problems.append(f"model.gpt.dropout={self.dropout}: must be at least 0 and below 1.")
        return problems
