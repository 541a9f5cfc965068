"""A document mask of a language model that sees: in training, in texts and in captions."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt_run import fit
from tiny_vlm_run import PairData, vlm_module

from lit_stable.vlm.captioning import write_captions
from lit_stable.vlm.module import VLMModule

END = 0
IDS = torch.tensor([[END, 7, 8, 9, END, 4, 5, 6]])
DOCUMENTS = [slice(0, 1), slice(1, 5), slice(5, 8)]
IMAGES = torch.full((1, 1, 4, 4), 60, dtype=torch.uint8)


@pytest.fixture(scope="module")
def module() -> VLMModule:
    masked = vlm_module(document_mask=True, document_separator=END, reset_positions=True, init_std=0.3)
    return fit(steps=4, module=masked, data=PairData()).module.eval()


@torch.no_grad()
def test_documents_of_a_sample_do_not_see_each_other_and_all_see_its_image(module):
    together = module(IDS, IMAGES)
    for own in DOCUMENTS:
        torch.testing.assert_close(together[:, own], module(IDS[:, own], IMAGES), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together, module(IDS, IMAGES * 0), atol=1e-4)
    as_given = torch.zeros_like(IDS)
    assert not torch.allclose(together[:, 5:], module(IDS, IMAGES, as_given)[:, 5:], atol=1e-3)
    assert torch.equal(module._forward_batch({"input_ids": IDS, "images": IMAGES}), together)
    batch = {"input_ids": IDS, "images": IMAGES, "documents": as_given}
    assert torch.equal(module._forward_batch(batch), module(IDS, IMAGES, as_given))


@torch.no_grad()
def test_texts_are_written_as_they_are_read(module):
    together = module.token_logits(IDS)
    for own in DOCUMENTS:
        torch.testing.assert_close(together[:, own], module.token_logits(IDS[:, own]), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_captions_are_written_as_they_are_read(module):
    ids = [END]
    while len(ids) < 7:
        ids.append(int(module(torch.tensor([ids]), IMAGES)[0, -1].argmax()))
    (caption,) = write_captions(module.gpt, module.sight, IMAGES, END, 6)
    new = ids[1:]
    assert caption == (new[: new.index(END)] if END in new else new)
