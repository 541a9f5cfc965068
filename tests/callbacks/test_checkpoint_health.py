from __future__ import annotations

import math

import pytest
import torch

from lit_stable.callbacks.checkpoint_health import health, is_rising, largest_activation


@pytest.mark.parametrize(
    ("values", "rises"),
    [
        ([1.0] * 20, False),
        ([1.0 + 0.02 * i for i in range(20)], True),
        ([1.4 - 0.02 * i for i in range(20)], False),
        ([1.0] * 10 + [5.0] + [1.0] * 9, False),  # one outlier
        ([1.0, 2.0, 3.0], False),  # too few to say
        ([1.0, math.nan], True),
    ],
)
def test_rising_is_by_the_first_and_the_last_quarter(values: list[float], rises: bool) -> None:
    assert is_rising(values) is rises


@pytest.mark.parametrize(
    ("arguments", "healthy"),
    [
        ((True, False, None, []), True),
        ((False, False, None, []), False),
        ((True, True, None, []), False),
        ((True, False, 1.0, []), True),
        ((True, False, 0.5, []), False),
        ((True, False, None, [1.0 + 0.1 * i for i in range(20)]), False),
    ],
)
def test_each_thing_that_is_measured_must_be_well(
    arguments: tuple[bool, bool, float, list[float]], healthy: bool
) -> None:
    assert health(*arguments)["healthy"] is healthy


def test_what_is_not_measured_is_not_spoken_of() -> None:
    assert set(health(True, False, None, [])) == {"healthy", "loss_in_band", "no_trouble"}


def test_the_largest_activation_is_found_by_name() -> None:
    metrics = {"stability/activation_rms/a": torch.tensor(2.0), "stability/activation_rms/b": 3.0, "loss": 9.0}
    assert largest_activation(metrics) == 3.0
    assert largest_activation({"loss": 9.0}) is None
