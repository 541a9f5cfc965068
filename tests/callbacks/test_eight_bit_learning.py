"""8-bit Adam learns as 32-bit Adam does, also after its moments have been rounded hundreds of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eight_bit_models import converted, planned
from torch import Tensor, nn

TOKENS, CONTEXT, BATCH, STEPS = 64, 4, 32, 300


def text(tokens: int, seed: int) -> Tensor:
    """Token ids, (tokens,), each of which follows the last by one of four rules, the first of them mostly."""
    generator = torch.Generator().manual_seed(seed)
    rules = [torch.randperm(TOKENS, generator=torch.Generator().manual_seed(rule)).tolist() for rule in range(4)]
    chosen = torch.multinomial(torch.tensor([0.7, 0.1, 0.1, 0.1]), tokens, replacement=True, generator=generator)
    ids = [0]
    for rule in chosen.tolist():
        ids.append(rules[rule][ids[-1]])
    return torch.tensor(ids[1:])


def windows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """All contexts, (n, CONTEXT), and the tokens that follow them, (n,)."""
    contexts = ids.unfold(0, CONTEXT, 1)[:-1]
    return contexts, ids[CONTEXT:]


def validation_loss(state_map: Any, bits: int) -> float:
    """Of a language model in 300 steps from one seed: an embedding in 32 bit, three matrices in ``bits``."""
    torch.manual_seed(0)
    layers = [nn.Embedding(TOKENS, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 128), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(128, 64), nn.GELU(), nn.Linear(64, TOKENS))
    optimizer = converted(model, plan=planned(model, state_map, bits=bits), lr=3e-3, betas=(0.9, 0.95))
    contexts, following = windows(text(BATCH * STEPS + CONTEXT, seed=1))
    for step in torch.randperm(STEPS, generator=torch.Generator().manual_seed(2)).tolist():
        batch = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(contexts[batch]), following[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        held_out, after = windows(text(2000, seed=3))
        return float(F.cross_entropy(model(held_out), after))


@pytest.fixture(scope="module")
def wide() -> float:
    return validation_loss("dynamic", 32)


@pytest.mark.parametrize("state_map", ["dynamic", "linear"])
def test_300_steps_end_within_a_hundredth_of_the_loss_of_32_bit(state_map: str, wide: float) -> None:
    narrow = validation_loss(state_map, 8)
    assert wide < 2.0 < torch.tensor(TOKENS).log()
    assert abs(narrow - wide) < 0.01 * wide
