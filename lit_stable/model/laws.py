"""By which law each parameter starts: a function of its name, its whole shape and the configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from lit_stable.callbacks.wrapper_names import unwrapped
from lit_stable.model.config import GPTConfig
from lit_stable.model.init_options import named_std
from lit_stable.model.qk_norm import initial_cosine_scale

_RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


@dataclass(frozen=True)
class Law:
    """How one parameter starts."""

    kind: Literal["normal", "uniform", "constant", "sinusoidal"]
    value: float
    """Standard deviation about zero; of a constant the constant."""

    @property
    def bound(self) -> float:
        """Half the width of a uniform law."""
        return self.value * math.sqrt(3)


def law_of(name: str, shape: Sequence[int], config: GPTConfig) -> Law:
    """The law of a parameter by its name in the GPT, wrappers or not, and its shape before any sharding."""
    name = plain_name(name, config)
    if len(shape) < 2:
        return Law("constant", _constant(name, config))
    matching = [law for pattern, law in _overrides(config).items() if fnmatchcase(name, pattern)]
    if matching:
        return _overridden(matching[-1], shape, config)
    if config.residual_rescale and name.endswith(_RESIDUAL_OUTPUTS):
        # 2L sub-layers add to the residual stream; their variances sum to that of one.
        return Law("normal", config.std / math.sqrt(2 * config.n_layer))
    return Law("normal", config.std)


def plain_name(name: str, config: GPTConfig) -> str:
    """The name that decides the draw: free of wrappers, and one for a tied matrix whichever module is filled first."""
    name = unwrapped(name)
    return "wte.weight" if config.tied and name == "head.weight" else name


def sinusoids(length: int, width: int) -> torch.Tensor:
    """sin(p / 10000^(2i/width)) in column 2i and the cosine beside it, (length, width) fp32.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    column = torch.arange(width, dtype=torch.float64)
    phases = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** -((column // 2) * 2 / width)
    return torch.where(column % 2 == 0, phases.sin(), phases.cos()).float()


def idle_overrides(gpt: nn.Module, config: GPTConfig) -> list[str]:
    """One sentence for each pattern of `init_overrides` that matches none of the GPT's matrices."""
    names = [plain_name(name, config) for name, parameter in gpt.named_parameters() if parameter.ndim >= 2]
    kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return [
        f"model.gpt.init_overrides.{pattern}: matches no matrix of this model, which has {', '.join(kinds)}."
        for pattern in config.init_overrides
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def _constant(name: str, config: GPTConfig) -> float:
    """Gains start at one, however they are stored; biases at 0."""
    if name.endswith("qk_scale.scale"):
        return initial_cosine_scale(config.max_length)
    return 0.0 if name.endswith("bias") or config.norm_gain == "zero_centred" else 1.0


def _overrides(config: GPTConfig) -> dict[str, float | str]:
    stable: dict[str, float | str] = {"wte.weight": "xavier"} if config.stable_embedding else {}
    return {**stable, **config.init_overrides}


def _overridden(law: float | str, shape: Sequence[int], config: GPTConfig) -> Law:
    if law == "sinusoidal":
        return Law("sinusoidal", math.sqrt(0.5))  # mean square of a sine and its cosine; exact for even widths
    if law == "xavier":
        return Law("uniform", math.sqrt(2 / sum(shape)))  # bound sqrt(6 / (rows + columns)) (Glorot and Bengio 2010)
    return Law("normal", named_std(law, config.d_model))  # type: ignore[arg-type]
