"""What is published of a model, against what a recipe builds: a wrong shape is found before it is trained.

tr8-104B was trained for a while as 57B: width and depth were set, and the width inside the MLP stayed behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.stages import Count, parse_count
from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import parameter_count
from lit_stable.run.console import human_count

_TOLERANCE = 1e-3


@judges_arguments(ValueError, "published")
@dataclass(frozen=True)
class Published:
    """What must be true of the model's shape; nothing is asked where all is null."""

    parameters: Count | None = None
    """Number of parameters, as in 103.96B; the model's must be within 0.1 %."""

    d_ff_ratio: float | None = None
    """Width inside the MLP in multiples of d_model, as in 4."""

    def __post_init__(self) -> None:
        if self.parameters is not None:
            try:
                whole = parse_count(self.parameters)
            except ValueError as error:
                raise ValueError(f"published.parameters: {error}") from None
            if whole < 1:
                raise ValueError(f"published.parameters={self.parameters}: must be at least 1.")
        if self.d_ff_ratio is not None and not self.d_ff_ratio > 0:
            raise ValueError(f"published.d_ff_ratio={self.d_ff_ratio}: must be > 0.")

    def problems(self, config: GPTConfig) -> list[str]:
        """What is not true of a model."""
        problems = []
        deviation = self.deviation(config)
        if deviation is not None and abs(deviation) > _TOLERANCE:
            problems.append(
                f"published.parameters={self.parameters}: the model has {human_count(parameter_count(config))},"
                f" {deviation:+.3%}; correct model.gpt, or set it to null. Allowed is {_TOLERANCE:.1%}."
            )
        if self.d_ff_ratio is not None and config.hidden != round(self.d_ff_ratio * config.d_model):
            problems.append(
                f"published.d_ff_ratio={self.d_ff_ratio:g}: model.gpt.d_ff={config.hidden} is"
                f" {config.hidden / config.d_model:.4g} x d_model={config.d_model}; it must be"
                f" {round(self.d_ff_ratio * config.d_model)}."
            )
        return problems

    def deviation(self, config: GPTConfig) -> float | None:
        """By how much of the published number the model's is larger; None where none is given."""
        if self.parameters is None:
            return None
        return parameter_count(config) / parse_count(self.parameters) - 1

    def line(self, config: GPTConfig) -> str | None:
        """For the page of `check`."""
        deviation = self.deviation(config)
        return None if deviation is None else f"published: {self.parameters} parameters, the model {deviation:+.4%}"


NOTHING_PUBLISHED = Published()
