"""Options of what stands before the first block: token embedding and positions."""

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lit_stable.model.config import GPTConfig

PositionKind = Literal["learned", "rope", "alibi"]


# Annotations are objects here, not text: the command line reads those of `GPTConfig` where `GPTConfig` stands.
@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """The part of a `GPTConfig` that the embedding reads. Order: shrink, scale, norm, positions, dropout."""

    position: PositionKind = "learned"
    """learned: a table added to the token embedding. rope: rotary phases in attention (Su et al. 2021). alibi: a
    penalty on scores that grows with distance (Press et al. 2022)."""

    rope_theta: float = 10000.0
    """Base of the rotary wavelengths; read with `position: rope` only."""

    embed_norm: bool = False
    """Norm of the token embedding before positions are added, as in BLOOM and BloombergGPT."""

    stable_embedding: bool = False
    """Layer norm after the token embedding and Xavier-uniform weights, bound sqrt(6 / (vocab_size + d_model)), as in
    bitsandbytes' StableEmbedding: `embed_norm` and `init_overrides: {wte.weight: xavier}` in one switch."""

    embed_scale: float | Literal["sqrt_d"] = 1.0
    """Factor on the token embedding; sqrt_d: sqrt(d_model) (Vaswani et al. 2017, section 3.4)."""

    embed_grad_shrink: float | list[tuple[int, float]] | None = None
    """Share of its gradient that the token embedding gets, in [0, 1] (GLM-130B, arXiv:2210.02414): a
    number, or [optimizer step, share] points with straight lines between them, as in [[6000, 0.1], [6500, 1.0]]."""

    embed_dropout: float | None = None
    """Of the sum of token embedding and positions; null: `dropout`."""

    @property
    def has_embed_norm(self) -> bool:
        """Whether a norm stands after the token embedding."""
        return self.embed_norm or self.stable_embedding

    def embed_gradient(self, step: int) -> float:
        """Share of its gradient that the token embedding gets in the optimizer step after ``step`` others."""
        points = self.embed_grad_shrink
        if not isinstance(points, list):
            return 1.0 if points is None else points
        if step <= points[0][0]:
            return points[0][1]
        for (start, share), (stop, next_share) in itertools.pairwise(points):
            if step < stop:
                return share + (next_share - share) * (step - start) / (stop - start)
        return points[-1][1]


def embedding_problems(config: "GPTConfig") -> list[str]:
    """What is wrong with the values and their combinations, one sentence each."""
    problems = []
    scale = config.embed_scale
    if scale != "sqrt_d" and (isinstance(scale, str) or not 0 < scale < math.inf):
        problems.append(f"model.gpt.embed_scale={scale!r}: must be a finite number above 0 or sqrt_d.")
    if scale != 1 and config.has_embed_norm:
        problems.append(
            f"model.gpt.embed_scale={scale}: the norm after the embedding takes the factor out again; set it to 1.0."
        )
    if config.stable_embedding and config.norm != "layernorm":
        problems.append(
            f"model.gpt.stable_embedding=True: is a layer norm, and norm={config.norm}; write embed_norm: true and"
            " init_overrides: {wte.weight: xavier}."
        )
    return problems + _shrink_problems(config.embed_grad_shrink)


def _shrink_problems(shrink: float | list[tuple[int, float]] | None) -> list[str]:
    if shrink is None:
        return []
    points = shrink if isinstance(shrink, list) else [(0, shrink)]
    shares_fit = bool(points) and all(0 <= share <= 1 for _, share in points)
    rising = all(later > earlier for (earlier, _), (later, _) in itertools.pairwise(points))
    if shares_fit and rising and points[0][0] >= 0:
        return []
    return [
        f"model.gpt.embed_grad_shrink={shrink}: must be a share in [0, 1], or [step, share] points with rising steps"
        " from 0 on."
    ]
