"""What tests on GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from no_sync import set_mode


@pytest.fixture(autouse=True)
def waiting_is_allowed_again() -> Iterator[None]:
    """After a test that failed in a step which may not wait."""
    yield
    set_mode("default")
