"""The head's product and the cross-entropy behind it in one autograd node, for training on CUDA.

Apart, logits are written, read for the loss, read again and overwritten with their gradient; with an fp32 head each of
these passes is twice as long, and all three products run at the rate of TF32, half that of 16 bits. Together, the
kernel of the loss reads the logits and leaves what the gradient needs of them, softmax minus one-hot, in 16 bits; of an
fp32 head no logit is written at all. What the loss is multiplied by is known only in the backward pass, but is one
number per row, so the small tensors take it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_stable.callbacks.ignored_label import IGNORED
from lit_stable.model.linear import fp32_product
from lit_stable.model.loss import position_losses

WORD_MULTIPLE = 64
"""To a multiple of it words are padded: with 50257 all three products and the loss take 3 to 5 times as long."""

_FP16_LOG2_ONE = 15  # gradients are stored so many powers of 2 larger in fp16, whose smallest number is then 2^-39


class HeadLoss(torch.autograd.Function):
    """Cross-entropies (N,), fp32, of hidden (N, D), weight (V, D) and labels (N,); 0 where the label is -100.

    Args, behind these three:
        operands: Of all three products: bf16 or fp16. fp16 keeps 11 significant bits, as TF32 does, at twice its rate.
        wide: Whether logits are fp32, or rounded to the dtype of the operands. Sums are in fp32 either way, and so are
            the gradients before they take the dtypes of hidden and weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, operands: torch.dtype, wide: bool) -> Tensor:
        ctx.dtypes, ctx.vocab = (hidden.dtype, weight.dtype), len(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(operands).contiguous(), weight.to(operands).contiguous()
            if padding := -len(w) % WORD_MULTIPLE:
                w = F.pad(w, (0, 0, 0, padding))
            unscaled = h.new_empty(len(h), len(w))  # softmax minus one-hot, times 2^`_log2_one`; 0 in the padding
            losses = torch.empty(len(h), dtype=torch.float32, device=h.device)
            _write_losses_and_gradients(h, w, len(weight), labels, losses, unscaled, wide)
        ctx.save_for_backward(h, w, unscaled)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        h, w, unscaled = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        one = 2.0 ** _log2_one(h.dtype)
        by_hidden = by_weight = None
        with torch.autocast(h.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                by_hidden = fp32_product(unscaled, w).mul_((by_loss / one)[:, None]).to(hidden_dtype)
            if ctx.needs_input_grad[1]:
                # Of a mean the factors of all rows are equal or 0: over the largest they are exact in 16 bits.
                largest = by_loss.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
                factors = (by_loss / largest)[:, None].to(h.dtype)
                by_weight = fp32_product(unscaled.t(), h * factors)[: ctx.vocab].mul_(largest / one).to(weight_dtype)
        return by_hidden, by_weight, None, None, None


def _log2_one(dtype: torch.dtype) -> int:
    """The power of 2 that 1 is stored as among the gradients of this dtype."""
    return _FP16_LOG2_ONE if dtype == torch.float16 else 0


def _write_losses_and_gradients(
    h: Tensor, w: Tensor, vocab: int, labels: Tensor, losses: Tensor, gradients: Tensor, wide: bool
) -> None:
    """Fill losses (N,) and gradients (N, padded V) from h (N, D) and w (padded V, D)."""
    log2_one = _log2_one(gradients.dtype)
    if h.is_cuda and wide:
        from lit_stable.model.head_kernel import write_losses_and_gradients_of_product

        write_losses_and_gradients_of_product(h, w, vocab, labels, losses, gradients, log2_one, IGNORED)
    elif h.is_cuda:
        from lit_stable.model.loss_kernel import write_losses_and_gradients

        logits = torch.mm(h, w.t(), out=gradients)
        write_losses_and_gradients(logits, vocab, labels, losses, log2_one, IGNORED)
    else:
        logits = (fp32_product(h, w.t()) if wide else h @ w.t())[:, :vocab]
        losses.copy_(position_losses(logits[None], labels[None], with_z=False)[0][0])
        counted = labels != IGNORED
        share = logits.float().softmax(-1)
        share[counted.nonzero()[:, 0], labels[counted]] -= 1
        gradients.zero_()[:, :vocab] = 2.0**log2_one * share * counted[:, None]
