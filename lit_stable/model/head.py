"""From the residual stream to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.compute_dtype import SIXTEEN_BITS, compute_dtype
from lit_stable.model.config import GPTConfig
from lit_stable.model.head_loss import HeadLoss
from lit_stable.model.linear import sums_may_stay_fp32
from lit_stable.model.soft_cap import soft_cap

_PRODUCTS_IN_TRITON = (8, 0)
"""The least compute capability for which it makes products of tensor cores: Ampere's."""


class Head(nn.Linear):
    """Logits of the next token, hidden (B, T, D) -> (B, T, V); with `head_fp32` products and result are fp32.

    With labels (B, T), and where `HeadLoss` can be used, their cross-entropies (B, T) instead, in fp32; see there for
    what products of an fp32 head are then.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.fp32 = config.head_fp32
        self.cap = config.logit_soft_cap

    def forward(self, input: torch.Tensor, *, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is not None and (operands := self._operands(input)) is not None:
            hidden, targets = input.flatten(0, 1), labels.flatten()
            losses: torch.Tensor = HeadLoss.apply(hidden, self.weight, targets, operands, self.fp32)  # type: ignore[no-untyped-call]
            return losses.view_as(labels)
        logits = self._fp32_product(input) if self.fp32 else self._product(input)
        return logits if self.cap is None else soft_cap(logits, self.cap)

    def _operands(self, input: torch.Tensor) -> torch.dtype | None:
        """What `HeadLoss` multiplies in; ``None`` where it cannot be used or gains nothing."""
        if self.cap is not None or not sums_may_stay_fp32(input, self.weight):
            return None
        dtype = compute_dtype(self.weight)
        if not self.fp32:
            return dtype if dtype in SIXTEEN_BITS else None
        if torch.cuda.get_device_capability(input.device) < _PRODUCTS_IN_TRITON:
            return None
        # A sharding wrapper leaves the weights of an fp32 head in fp32: the stream tells in what the blocks compute.
        return torch.float16 if dtype in SIXTEEN_BITS or input.dtype in SIXTEEN_BITS else None

    def _product(self, input: torch.Tensor) -> torch.Tensor:
        # Does something only where an fp32 residual stream meets weights that a sharding wrapper has rounded.
        return super().forward(input.to(compute_dtype(self.weight)))

    def _fp32_product(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float())
