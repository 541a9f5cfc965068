"""Which optimizer, with which constants, for which parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from lit_stable.callbacks.argument_types import judges_arguments

OptimizerName = Literal["adamw", "adam", "sgd"]
DecayKind = Literal["coupled", "independent"]


@judges_arguments(ValueError)
@dataclass(frozen=True)
class PatternOptions:
    """What the parameters of one pattern do otherwise than the rest."""

    lr_factor: float = 1.0
    """Learning rate of theirs, relative to the schedule's; > 0."""

    weight_decay: float | None = None
    """Decay of theirs, whatever their role; null: that of their role."""


@judges_arguments(ValueError, "optimizer")
@dataclass(frozen=True)
class OptimizerOptions:
    """Adam with decoupled decay, Adam with decay in the gradient, or SGD.

    Raises:
        ValueError: with one line per problem, all problems at once.

    Example::

        >>> OptimizerOptions(betas=(0.9, 0.98), weight_decay=0.05).moments
        2
    """

    name: OptimizerName = "adamw"
    """adamw: Loshchilov and Hutter 2019, arXiv:1711.05101. adam: Kingma and Ba 2015, arXiv:1412.6980, decay added to
    the gradient; both fused. sgd: likewise, with `momentum`, not fused, so that skipping a step costs a host sync."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment, each in [0, 1); not read by sgd."""

    eps: float = 1e-8
    """Added to the root of the second moment, > 0; not read by sgd."""

    momentum: float = 0.0
    """Of sgd, in [0, 1); 0: none."""

    weight_decay: float = 0.1
    """Of linear weights and, if so chosen, embeddings and norm gains; biases are never decayed."""

    decay: DecayKind = "coupled"
    """Of adamw, what a step takes from a weight. coupled: lr x weight_decay. independent: weight_decay x lr / peak, so
    that another peak rate leaves it as it is (Wortsman et al. 2023, arXiv:2309.14322). At rate 0 both take nothing."""

    decay_embeddings: bool = True
    """Whether embedding weights are decayed too."""

    decay_norms: bool = False
    """Whether norm gains are decayed too: towards 1 with `model.gpt.norm_gain: zero_centred`, else towards 0, which is
    what BloombergGPT's first runs did."""

    patterns: dict[str, PatternOptions] = field(default_factory=dict)
    """Exceptions by shell patterns for parameter names, such as wte.weight or blocks.0.*; the last pattern that matches
    wins, and one that is left with no parameter is an error."""

    def __post_init__(self) -> None:
        problems = [*self._value_problems(), *self._combination_problems(), *self._pattern_problems()]
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def moments(self) -> int:
        """Numbers of optimizer state per parameter."""
        if self.name == "sgd":
            return 1 if self.momentum else 0
        return 2

    def _value_problems(self) -> Iterator[str]:
        for name, kind in (("name", OptimizerName), ("decay", DecayKind)):
            if getattr(self, name) not in get_args(kind):
                yield f"optimizer.{name}={getattr(self, name)!r}: must be one of {', '.join(get_args(kind))}."
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"optimizer.betas={self.betas}: each must lie in [0, 1)."
        if not self.eps > 0:
            yield f"optimizer.eps={self.eps}: must be > 0."
        if not 0 <= self.momentum < 1:
            yield f"optimizer.momentum={self.momentum}: must lie in [0, 1)."
        if not 0 <= self.weight_decay < math.inf:
            yield f"optimizer.weight_decay={self.weight_decay}: must be a finite number >= 0."

    def _combination_problems(self) -> Iterator[str]:
        if self.momentum and self.name != "sgd":
            yield (
                f"optimizer.momentum={self.momentum}: belongs to sgd; {self.name} averages gradients by betas[0], set"
                " it to 0.0."
            )
        if self.decay == "independent" and self.name != "adamw":
            yield (
                f"optimizer.decay=independent: {self.name} adds decay to the gradient, where it cannot be independent"
                " of the rate; take adamw."
            )

    def _pattern_problems(self) -> Iterator[str]:
        for pattern, options in self.patterns.items():
            key = f"optimizer.patterns.{pattern}"
            if not 0 < options.lr_factor < math.inf:
                yield f"{key}.lr_factor={options.lr_factor}: must be a finite number > 0; freeze by layer_norm_freeze."
            if options.weight_decay is not None and not 0 <= options.weight_decay < math.inf:
                yield f"{key}.weight_decay={options.weight_decay}: must be a finite number >= 0."
            if options == PatternOptions():
                yield f"{key}: changes nothing; give lr_factor or weight_decay."


ADAMW = OptimizerOptions()
"""What a run gets that asks for nothing."""
