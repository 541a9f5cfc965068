"""Ranges of optimizer steps as one writes them: ``13251-14000``."""

from __future__ import annotations

import re

Steps = tuple[int, int]  # first and last optimizer step, both included, counted from 1


def parse_steps(request: str | int) -> Steps:
    """Read ``"13251-14000"`` or a single step.

    Raises:
        ValueError: when it is neither, or not 1 <= FIRST <= LAST.

    Example::

        >>> parse_steps("13251-14000"), parse_steps(7)
        ((13251, 14000), (7, 7))
    """
    match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", str(request))
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError("must be a step or FIRST-LAST with 1 <= FIRST <= LAST, as 13251-14000.")
    return first, last
