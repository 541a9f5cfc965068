"""Leave the loss of repetitions out of training.

OLMo-core leaves out the loss of every sequence with a stretch of period 1 to 13 that holds its period 32 times or more
(``InstanceFilterConfig``): a loss that a model lowers by copying says nothing about the rest, and such sequences were
seen to spike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.data.repeats import in_repeats


@judges_arguments(ValueError, "data.mask_repeats")
@dataclass(frozen=True)
class MaskRepeats:
    """Which repetitions a run does not train on.

    Args:
        max_period: Longest period that is looked for, in tokens, >= 1; all shorter ones are too.
        min_count: How often a period must stand in a stretch for it to count, >= 2.
        scope: ``sequence`` leaves out the loss of every sequence that holds such a stretch, as OLMo-core does;
            ``tokens`` that of the stretch alone.
    """

    max_period: int = 13
    min_count: int = 32
    scope: Literal["sequence", "tokens"] = "sequence"

    def problems(self) -> list[str]:
        """What is wrong with the values, under the key that they stand under in a recipe."""
        least = {"max_period": 1, "min_count": 2}
        return [
            f"data.mask_repeats.{name}={getattr(self, name)}: must be at least {bound}."
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]

    def mask(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of the ``tokens`` (B, L) are not to be predicted, (B, L)."""
        repeated = in_repeats(tokens, self.max_period, self.min_count)
        if self.scope == "sequence":
            return np.broadcast_to(repeated.any(axis=1, keepdims=True), repeated.shape)
        return repeated
