"""What LROverride refuses of its options."""

from __future__ import annotations

import math


def option_problems(
    start: int | None,
    weight_decay: float | None,
    betas: tuple[float, float] | None,
    eps: float | None,
    dropout: float | None,
    clip: float | None,
) -> list[str]:
    """What is wrong, one phrase each: the argument with its value, then the rule."""
    found = [f"start={start}: must be 0 or more."] if start is not None and start < 0 else []
    if weight_decay is not None and not 0 <= weight_decay < math.inf:
        found.append(f"weight_decay={weight_decay}: must be a finite number >= 0.")
    if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
        found.append(f"betas={betas}: must be two numbers in [0, 1).")
    found += [f"eps={eps}: must be a finite number > 0."] if eps is not None and not 0 < eps < math.inf else []
    found += [f"dropout={dropout}: must lie in [0, 1)."] if dropout is not None and not 0 <= dropout < 1 else []
    if clip is not None and not 0 < clip < math.inf:
        found.append(f"clip={clip}: must be a finite number > 0.")
    return found
