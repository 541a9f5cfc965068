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
    if weight_decay is not None and not weight_decay >= 0:
        found.append(f"weight_decay={weight_decay}: must be 0 or more.")
    found += [f"betas={betas}: each must lie in [0, 1)."] if betas and not all(0 <= b < 1 for b in betas) else []
    found += [f"eps={eps}: must be > 0."] if eps is not None and not eps > 0 else []
    found += [f"dropout={dropout}: must lie in [0, 1)."] if dropout is not None and not 0 <= dropout < 1 else []
    if clip is not None and not 0 < clip < math.inf:
        found.append(f"clip={clip}: must be a finite number > 0.")
    return found
