"""Lightning asks every installed package for callbacks whenever a Trainer is made: here they are read once.

Imported before Lightning is. Nothing is installed while tests run.
"""

from __future__ import annotations

import functools
import importlib.metadata

importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
