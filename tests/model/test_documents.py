"""Documents within a sample: their numbers, their positions, and that they do not see each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.documents import document_ids, document_positions, find_separator, visible
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise

END = 0
IDS = torch.tensor([[5, 6, END, 7, 8, 9, END, 4], [END, END, 3, 2, 1, 2, 3, END]])


def test_a_separator_belongs_to_the_document_it_ends():
    assert document_ids(IDS, END).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2, 2, 2]]


def test_positions_count_from_the_start_of_each_document():
    positions = document_positions(document_ids(IDS, END))
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 0, 1, 2, 3, 4, 5]]


def test_tokens_see_their_past_in_their_document():
    seen = visible(document_ids(IDS, END), 8, IDS.device)
    assert seen.shape == (2, 1, 8, 8)
    assert [row.nonzero().flatten().tolist() for row in seen[0, 0]] == [
        *([0], [0, 1], [0, 1, 2]),
        *([3], [3, 4], [3, 4, 5], [3, 4, 5, 6]),
        [7],
    ]
    assert torch.equal(visible(None, 8, IDS.device)[0, 0], torch.ones(8, 8).tril().bool())


def build(**fields) -> GPT:
    gpt = GPT(GPTConfig(vocab_size=10, n_layer=2, n_head=2, d_model=32, max_length=8, document_mask=True, **fields))
    initialise(gpt, 1)
    for name, parameter in gpt.named_parameters():
        if "qkv" in name:
            parameter.data.mul_(10)  # so that what is attended to matters
    return gpt


VARIANTS = [
    {"reset_positions": True},
    {"reset_positions": True, "attention_kernel": "explicit"},
    {"position": "rope", "qk_norm": "rmsnorm"},
    {"position": "alibi", "n_kv_head": 1},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_documents_in_one_sample_are_documents_run_alone(fields):
    gpt, documents = build(**fields), document_ids(IDS, END)
    with torch.no_grad():
        together = gpt(IDS, documents)
        for row, number in [(0, 0), (0, 1), (0, 2), (1, 2)]:
            own = documents[row] == number
            torch.testing.assert_close(together[row, own], gpt(IDS[row, own][None])[0], atol=1e-5, rtol=1e-4)
        assert not torch.allclose(together[0, 3:], gpt(IDS)[0, 3:], atol=1e-3)  # without the mask they are not


def test_positions_run_on_where_they_are_not_reset():
    gpt = build()
    with torch.no_grad():
        own = gpt(IDS, document_ids(IDS, END))[0, 3:7]
        shifted = gpt.trunk(torch.cat((IDS[:1, 3:7],), 1))[0]
        assert not torch.allclose(own, gpt.head(shifted), atol=1e-3)


def test_the_recipe_names_the_separator_or_else_the_data_do():
    data = SimpleNamespace(eot_id=7)
    assert find_separator(GPTConfig(), data) == 7
    assert find_separator(GPTConfig(document_separator=0), data) == 0
    with pytest.raises(ValueError, match=r"document_mask=True: object names no end-of-document token .*document_separ"):
        find_separator(GPTConfig(), object())
