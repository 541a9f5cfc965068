"""From the residual stream to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.compute_dtype import compute_dtype
from lit_stable.model.config import GPTConfig
from lit_stable.model.soft_cap import soft_cap


class Head(nn.Linear):
    """Logits of the next token, hidden (B, T, D) -> (B, T, V); with `head_fp32` products and result are fp32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.fp32 = config.head_fp32
        self.cap = config.logit_soft_cap

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = self._fp32_product(input) if self.fp32 else self._product(input)
        return logits if self.cap is None else soft_cap(logits, self.cap)

    def _product(self, input: torch.Tensor) -> torch.Tensor:
        # Does something only where an fp32 residual stream meets weights that a sharding wrapper has rounded.
        return super().forward(input.to(compute_dtype(self.weight)))

    def _fp32_product(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float())
