"""Values as JSON takes them."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """The same as strings, numbers, lists and dicts that JSON takes; what is not finite as a string."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
