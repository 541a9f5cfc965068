from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_stable.callbacks.generation import continue_tokens

CPU = torch.device("cpu")


def next_is_sum(ids: Tensor) -> Tensor:
    """Logits of a causal model that says: the sum of all tokens so far, modulo 10."""
    return torch.nn.functional.one_hot(ids.cumsum(1) % 10, 10).float() * 50


def by_hand(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum(ids[-window:] if window else ids) % 10)
    return ids[len(prompt) :]


@pytest.mark.parametrize("window", [None, 3, 4, 100])
def test_prompts_of_different_lengths_are_continued_as_each_alone(window: int | None) -> None:
    prompts = [[1, 2, 3, 4, 5], [7], [9, 9, 1]]
    new = continue_tokens(next_is_sum, prompts, 6, device=CPU, max_length=window)
    assert new.tolist() == [by_hand(prompt, 6, window) for prompt in prompts]


def test_an_object_with_logits_will_do_and_zero_tokens_too() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    assert continue_tokens(lambda ids: Output(next_is_sum(ids)), [[3]], 2, device=CPU).tolist() == [[3, 6]]
    assert continue_tokens(next_is_sum, [[3], [4]], 0, device=CPU).shape == (2, 0)


def fixed(ids: Tensor) -> Tensor:
    return torch.log(torch.tensor([0.5, 0.25, 0.2, 0.05])).expand(*ids.shape, 4)


def draws(**options: Any) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    new = continue_tokens(fixed, [[0]] * 400, 10, device=CPU, generator=generator, **options)
    return (torch.bincount(new.flatten(), minlength=4) / new.numel()).tolist()


def test_draws_follow_the_distribution_the_temperature_and_top_k() -> None:
    assert draws(temperature=1.0) == pytest.approx([0.5, 0.25, 0.2, 0.05], abs=0.03)
    squares = torch.tensor([0.5, 0.25, 0.2, 0.05]).square()
    assert draws(temperature=0.5) == pytest.approx((squares / squares.sum()).tolist(), abs=0.03)
    assert draws(temperature=1.0, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0], abs=0.03)
    assert draws(temperature=0.0) == [1.0, 0.0, 0.0, 0.0]


def test_only_its_own_generator_is_drawn_from() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    draws(temperature=1.0)
    assert torch.equal(torch.rand(1), expected)
    assert draws(temperature=1.0) == draws(temperature=1.0)


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, r"prompts=\[\]: give at least one"),
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([[1]], {"new_tokens": -1}, "new_tokens=-1: must be 0 or more"),
        ([[1]], {"temperature": -0.5}, "temperature=-0.5: must be 0 or more"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan: must be 0 or more"),
        ([[1]], {"top_k": 0}, "top_k=0: must be at least 1"),
    ],
)
def test_what_is_out_of_range_is_refused(prompts: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        continue_tokens(next_is_sum, prompts, **{"new_tokens": 1, "device": CPU, **options})
