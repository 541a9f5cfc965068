"""Activation checkpointing: what of a block is kept for its backward pass, and what is computed again there."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = bool | Literal["selective"]

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


def refuse_recompute(how: Recompute) -> None:
    """Raise where it is neither on, nor off, nor ``selective``."""
    if not isinstance(how, bool) and how != "selective":
        raise ValueError(f"model.recompute={how!r}: must be true, false or selective.")


def recomputing(residual: Any, how: Recompute) -> Any:
    """A block's function that keeps its input alone, or with ``selective`` also what is dear to compute again.

    That is the attention kernel's output, and every other matrix product: the projection to queries, keys and values,
    and the one into the MLP (Korthikanti et al. 2022, arXiv:2205.05198, section 5, on which activations to keep).
    """
    if not how:
        return residual
    if how == "selective":
        return partial(checkpoint, residual, use_reentrant=False, context_fn=_keep_attention_and_half_the_products)
    return partial(checkpoint, residual, use_reentrant=False)


def _keep_attention_and_half_the_products() -> Any:
    seen = {False: 0, True: 0}  # products so far, in the first pass and in the second

    def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            seen[context.is_recompute] += 1
        kept = operator in _ATTENTION or (operator in _PRODUCTS and seen[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
