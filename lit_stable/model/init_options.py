"""Options of the initial weights."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from lit_stable.model.config import GPTConfig

StdName = Literal["small_init", "mtnlg"]
LawName = Literal["small_init", "mtnlg", "xavier", "sinusoidal"]


# Annotations are objects here, not text: the command line reads those of `GPTConfig` where `GPTConfig` stands.
@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The part of a `GPTConfig` that decides how weights start. Gains start at one, biases at 0."""

    init_std: float | StdName = 0.02
    """Standard deviation of initial weights. small_init: sqrt(2 / (5 d_model)) (Nguyen and Salazar 2019). mtnlg:
    sqrt(1 / (3 d_model)) (Megatron-Turing NLG 530B, BLOOM, BloombergGPT)."""

    residual_rescale: bool = True
    """Divide the initial std of both output projections of a block by sqrt(2 n_layer) (GPT-2, Megatron-LM)."""

    init_overrides: dict[str, float | LawName] = field(default_factory=dict)
    """How single matrices start instead, by shell patterns for their names, such as wte.weight or blocks.*.mlp.up.*:
    a std, small_init, mtnlg, xavier (uniform, bound sqrt(6 / (rows + columns))) or, for wpe.weight, sinusoidal (Vaswani
    et al. 2017, section 3.5). Taken as it stands, not rescaled; the last pattern that matches wins; one that matches
    nothing is an error."""


def named_std(kind: float | StdName, d_model: int) -> float:
    """A standard deviation as a number.

    Example::

        >>> round(named_std("mtnlg", 14336), 7)
        0.004822
    """
    if kind == "small_init":
        return math.sqrt(2 / (5 * d_model))
    return math.sqrt(1 / (3 * d_model)) if kind == "mtnlg" else float(kind)


def init_problems(config: "GPTConfig") -> list[str]:
    """What is wrong with the values, one sentence each; that every pattern matches is checked on the model itself."""
    names = get_args(StdName)
    problems = []
    if config.init_std not in names and not _is_positive(config.init_std):
        problems.append(
            f"model.gpt.init_std={config.init_std!r}: must be a finite number above 0 or one of {', '.join(names)}."
        )
    for pattern, law in config.init_overrides.items():
        if law not in get_args(LawName) and not _is_positive(law):
            problems.append(
                f"model.gpt.init_overrides.{pattern}={law!r}: must be a finite number above 0 or one of"
                f" {', '.join(get_args(LawName))}."
            )
        if law == "sinusoidal" and pattern != "wpe.weight":
            problems.append(
                f"model.gpt.init_overrides.{pattern}=sinusoidal: is a table of positions; only wpe.weight takes it."
            )
    return problems


def _is_positive(value: float | str) -> bool:
    return not isinstance(value, str) and 0 < value < math.inf
