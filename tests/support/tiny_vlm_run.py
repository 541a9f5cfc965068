"""A language model with eyes, small enough to fit in a second, on images that the number of a sample fixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tiny_gpt_run import LENGTH, MICRO_BATCH, VOCAB, NumberedData, NumberedSamples

from lit_stable.model.config import GPTConfig
from lit_stable.optim.schedule import LRSchedule
from lit_stable.vlm.module import VLMModule
from lit_stable.vlm.options import GatedOptions, VisionOptions

#: Both backbones frozen, but for the norms of the language model from step 3 on.
FROZEN: list[Any] = [
    {"modules": ["gpt", "sight.vision"], "norms": "except"},
    {"modules": ["sight.vision"]},
    {"modules": ["gpt"], "stop": 3},
]


class NumberedPairs(NumberedSamples):
    """Each sample with an image that is one of three shades, as its walk has one of three steps."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in super().__iter__():
            shades = (batch["labels"][:, 0] - batch["input_ids"][:, 0]) % VOCAB * 60
            images = shades.to(torch.uint8)[:, None, None, None].expand(MICRO_BATCH, 1, 4, 4)
            yield {**batch, "images": images.contiguous()}


class PairData(NumberedData):
    image_size, channels, tokenizer = 4, 1, "bytes"

    def _stream(self, start: int) -> NumberedSamples:
        plain = super()._stream(start)
        return NumberedPairs(plain.start, plain.rank, plain.size, plain.length)


def vlm_module(qk_norm: Any = "none", **language: Any) -> VLMModule:
    gpt = GPTConfig(vocab_size=VOCAB, n_layer=2, n_head=2, d_model=32, max_length=LENGTH, **language)
    vision = VisionOptions(image_size=4, patch=2, n_layer=1, n_head=2, d_model=16)
    schedule = LRSchedule(peak=1e-2, warmup=16, horizon=80, unit="samples")
    return VLMModule(gpt, schedule, GatedOptions(qk_norm=qk_norm), vision, compile="off")
