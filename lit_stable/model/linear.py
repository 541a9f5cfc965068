"""A linear layer whose weight gradient leaves the product in fp32, where weights are fp32 and products 16 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_stable.model.compute_dtype import SIXTEEN_BITS, compute_dtype

# N tokens of a micro-batch, I inputs, O outputs

SUMS_STAY_FP32 = hasattr(torch.ops.aten.mm, "dtype")
"""Whether products of 16 bits can be left in fp32 on CUDA: since torch 2.8."""


class Linear(nn.Linear):
    """``nn.Linear``; under autocast on CUDA the gradients of an fp32 weight and bias are not rounded to 16 bits.

    Autocast rounds the sum over all tokens of a micro-batch and widens it for the weight. The product sums in fp32 in
    either case. Sharded weights are 16 bits where they are used, and their gradients too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input (..., I) -> (..., O)."""
        if not self._sums_in_fp32(input):
            return super().forward(input)
        output: Tensor = WideGradient.apply(input, self.weight, self.bias, compute_dtype(self.weight))  # type: ignore[no-untyped-call]
        return output

    def _sums_in_fp32(self, input: Tensor) -> bool:
        if not sums_may_stay_fp32(input, self.weight):
            return False
        return self.weight.dtype == torch.float32 and compute_dtype(self.weight) in SIXTEEN_BITS


class WideGradient(torch.autograd.Function):
    """input (..., I), weight (O, I) and bias (O) or None -> (..., O) in ``dtype``; gradients of the latter in fp32."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, w = input.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, w)
        ctx.input_dtype, ctx.has_bias = input.dtype, bias is not None
        return F.linear(x, w, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable  # of the 16-bit copies that it keeps, no graph leads back to input and weight
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        rows = by_output.reshape(-1, w.shape[0])  # (N, O)
        by_input = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_input = (by_output @ w).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            by_weight = fp32_product(rows.t(), x.reshape(-1, w.shape[1]))
        if ctx.has_bias and ctx.needs_input_grad[2]:
            by_bias = rows.sum(0, dtype=torch.float32)
        return by_input, by_weight, by_bias, None


def sums_may_stay_fp32(input: Tensor, weight: Tensor) -> bool:
    """Whether products of a weight for training can be left in fp32: on CUDA, of one that is here as a whole."""
    whole = type(weight) in (Tensor, nn.Parameter)  # no DTensor
    return input.is_cuda and torch.is_grad_enabled() and whole and SUMS_STAY_FP32


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """(N, K) and (K, M) in 16 bits -> (N, M), summed and left in fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
