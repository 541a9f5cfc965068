from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.generate import generate
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise

CONFIG = GPTConfig(vocab_size=40, n_layer=2, n_head=2, d_model=16, max_length=12, dropout=0.5, init_std=0.3)


@pytest.fixture
def gpt() -> GPT:
    model = GPT(CONFIG)
    initialise(model, 0)
    return model


def greedy_by_hand(gpt: GPT, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = gpt(torch.tensor([ids[-CONFIG.max_length :]]))
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_text_is_that_of_one_forward_pass_per_token_also_beyond_the_longest_sequence(gpt: GPT) -> None:
    prompts = [[1, 2, 3], [4], list(range(15))]
    made = generate(gpt, prompts, 16, temperature=0.0)
    gpt.eval()
    assert made == [greedy_by_hand(gpt, prompt, 16) for prompt in prompts]


def test_the_model_is_left_as_it_was_and_no_other_generator_is_drawn_from(gpt: GPT) -> None:
    gpt.train()
    gpt.blocks[1].eval()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = generate(gpt, [[1]], 8, seed=1)
    assert torch.equal(torch.rand(2), expected)
    assert gpt.training
    assert gpt.blocks[0].training
    assert not gpt.blocks[1].training
    assert generate(gpt, [[1]], 8, seed=1) == first != generate(gpt, [[1]], 8, seed=2)
    assert all(p.grad is None for p in gpt.parameters())


def test_a_continuation_ends_before_the_token_that_stops_it(gpt: GPT) -> None:
    (whole,) = generate(gpt, [[5]], 10, temperature=0.0)
    stop = whole[4]
    assert generate(gpt, [[5]], 10, temperature=0.0, stop_id=stop) == [whole[: whole.index(stop)]]


def test_a_document_mask_holds_where_text_is_written() -> None:
    masked = GPT(replace(CONFIG, document_mask=True, reset_positions=True, init_std=1.0))
    initialise(masked, 0)
    masked.eval()
    (after_an_end,), (alone,) = (generate(masked, [p], 4, temperature=0.0, eot_id=9) for p in ([1, 2, 9, 3, 4], [3, 4]))
    assert after_an_end == alone
    assert generate(masked, [[1, 2, 9, 3, 4]], 4, temperature=0.0) != [alone]  # nobody says what ends a document


def test_an_empty_prompt_is_refused(gpt: GPT) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        generate(gpt, [[]], 1)
