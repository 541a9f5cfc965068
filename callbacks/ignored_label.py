"""The label of a position that is not predicted."""

from __future__ import annotations

IGNORED = -100
"""What torch's cross entropy leaves out unless it is told otherwise."""
