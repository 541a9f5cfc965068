"""Options of the new blocks and of the vision backbone, and the configurations that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.model.attention_options import QKNormKind
from lit_stable.model.config import GPTConfig, MLPKind, NormKind

BlockNorms = Literal["pre", "sandwich"]
_KINDS = {"qk_norm": QKNormKind, "norm": NormKind, "norm_position": BlockNorms, "mlp": MLPKind}


@judges_arguments(ValueError, "model.gated")
@dataclass(frozen=True)
class GatedOptions:
    """Blocks of gated cross-attention between the layers of a language model (Flamingo, arXiv:2204.14198, section 2.2).

    Raises:
        ValueError: with one line per problem.
    """

    every: int = 1
    """A new block stands in front of every so many layers of the language model, >= 1."""

    first: int = 0
    """The first layer that has one, counted from 0. 0: a new block comes right behind the embedding; 1: a pre-trained
    layer does."""

    qk_norm: QKNormKind = "none"
    """Norm of each head's queries and keys, as `model.gpt.qk_norm`."""

    qk_l2_scale: float | Literal["learned"] = "learned"
    """Factor on the cosines under `qk_norm: l2`. learned: starts at log2(L^2 - L), L being `model.gpt.max_length`."""

    norm: NormKind = "layernorm"
    """Kind of the blocks' norms."""

    norm_position: BlockNorms = "pre"
    """pre: norms of each sub-layer's input. sandwich: of its output too, so behind the output projections of attention
    and MLP."""

    mlp: MLPKind = "gelu"
    """As `model.gpt.mlp`."""

    bias: bool = True
    """Biases in linear layers and layer norms."""

    init_std: float = 0.02
    """Standard deviation of the initial matrices, > 0."""

    def __post_init__(self) -> None:
        problems = []
        if self.every < 1:
            problems.append(f"model.gated.every={self.every}: must be at least 1.")
        if self.first < 0:
            problems.append(f"model.gated.first={self.first}: must be 0 or more.")
        if not 0 < self.init_std < math.inf:
            problems.append(f"model.gated.init_std={self.init_std}: must be a finite number above 0.")
        if self.qk_l2_scale != "learned" and not 0 < self.qk_l2_scale < math.inf:
            problems.append(f"model.gated.qk_l2_scale={self.qk_l2_scale}: must be a finite number above 0, or learned.")
        for name, kind in _KINDS.items():
            if (value := getattr(self, name)) not in get_args(kind):
                problems.append(f"model.gated.{name}={value!r}: must be one of {', '.join(get_args(kind))}.")
        if problems:
            raise ValueError("\n".join(problems))

    def places(self, language: GPTConfig) -> list[int]:
        """The layers of a language model that have a new block in front of them.

        Raises:
            ValueError: when none has.
        """
        found = list(range(self.first, language.n_layer, self.every))
        if not found:
            raise ValueError(
                f"model.gated.first={self.first}: the language model has layers 0 to {language.n_layer - 1}, so no new"
                " block would stand anywhere."
            )
        return found

    def config(self, language: GPTConfig) -> GPTConfig:
        """What the parts of a new block are built by: the language model's sizes, and the options above."""
        return replace(
            language,
            n_kv_head=None,
            d_ff=None,
            qk_norm=self.qk_norm,
            qk_l2_scale=self.qk_l2_scale,
            attention_scale="post",
            norm=self.norm,
            norm_position=self.norm_position,
            norm_gain="one",
            mlp=self.mlp,
            bias=self.bias,
            init_std=self.init_std,
            init_overrides={},
            stable_embedding=False,
        )


@judges_arguments(ValueError, "model.vision")
@dataclass(frozen=True)
class VisionOptions:
    """A vision backbone: a small ViT (arXiv:2010.11929), or a model of `transformers`.

    Raises:
        ValueError: with one line per problem.
    """

    image_size: int = 8
    """Height and width of an image in pixels."""

    channels: int = 1
    """1: grey; 3: red, green, blue."""

    patch: int = 2
    """Height and width of a patch; must divide image_size."""

    n_layer: int = 2
    """Number of blocks."""

    n_head: int = 2
    """Number of attention heads; must divide d_model."""

    d_model: int = 64
    """Width of a patch's features."""

    run: str | None = None
    """Whose trained weights to begin with: a run with the same vision backbone, by its name, folder or checkpoint.
    null: by chance, from `model.seed_init`."""

    hf: str | None = None
    """Folder of a vision model that `transformers` reads, in place of the ViT; the options above but the image's are
    not read then."""

    def __post_init__(self) -> None:
        problems = [
            f"model.vision.{name}={getattr(self, name)}: must be at least 1."
            for name in ("image_size", "patch", "n_layer", "n_head", "d_model")
            if getattr(self, name) < 1
        ]
        if self.channels not in (1, 3):
            problems.append(f"model.vision.channels={self.channels}: must be 1 or 3.")
        if not problems and self.image_size % self.patch:
            problems.append(f"model.vision.patch={self.patch}: must divide image_size={self.image_size}.")
        if not problems and self.d_model % self.n_head:
            problems.append(f"model.vision.n_head={self.n_head}: must divide d_model={self.d_model}.")
        if self.run is not None and self.hf is not None:
            problems.append(
                f"model.vision.run={self.run} and hf={self.hf}: each is a vision backbone; set one of them to null."
            )
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch) ** 2

    def config(self) -> GPTConfig:
        """What the parts of a block are built by."""
        return GPTConfig(
            vocab_size=1,
            n_layer=self.n_layer,
            n_head=self.n_head,
            d_model=self.d_model,
            max_length=self.patches,
            bias=True,
            init_std="small_init",  # a fixed one that suits thousands of columns is nothing at a few dozen
        )


def tensor_parallel_problem(size: int) -> str | None:
    """What is wrong with matrices that are split over so many ranks."""
    if size == 1:
        return None
    return f"mesh.tensor_parallel={size}: new blocks and vision backbone cannot be split; set it to 1."
