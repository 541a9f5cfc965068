"""16-bit precision under `fully_shard`: a policy of the sharded parameters instead of autocast."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch.distributed.fsdp import MixedPrecisionPolicy

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies.loss_scale import LossScaler


def _policy(compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    # Inputs are not cast: a block's input has its dtype already, and fp32 side inputs must keep theirs.
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)


POLICIES = {
    "bf16-mixed": _policy(torch.bfloat16, torch.float32),
    "16-mixed": _policy(torch.float16, torch.float32),
    "16-true": _policy(torch.float16, torch.float16),
}
"""By precision: the dtype of gathered weights and of all that is computed with them, and the one that gradients are
reduced in. Shards, their gradients and the optimizer's state are fp32 in each."""


class FSDP2Precision(MixedPrecision):
    """16 bits as a policy of the sharded parameters instead of autocast: all-gathers move half the bytes.

    Weights, gradients and optimizer state are stored in fp32; weights are rounded for the forward and backward pass.
    The LightningModule applies ``policy`` in ``configure_model``. fp16 needs a loss scale, on which all ranks agree.

    Args:
        precision: ``bf16-mixed``; ``16-mixed``: fp16, gradients reduced in fp32; ``16-true``: gradients are reduced in
            fp16 as well, as OPT-175B did.
        scaler: Of the loss, with fp16; ``None``: one with the default policy, on ``device``.
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, precision: str, scaler: LossScaler | None = None, device: str = "cuda") -> None:
        if precision == "bf16-mixed":
            super().__init__("bf16-mixed", device)
        else:
            super().__init__("16-mixed", device, scaler or LossScaler(device=device, over_ranks=True))
        self.precision = precision  # type: ignore[assignment]  # Lightning knows no 16-true with a scaler
        self.policy = POLICIES[precision]

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Nothing: the policy does what autocast would."""
        yield


def as_policy(plugin: Precision | None, device: str) -> Precision | None:
    """The plugin that does under FSDP2 what Lightning's does elsewhere.

    Raises:
        MisconfigurationException: for a precision that is not trained in under FSDP2.
    """
    if plugin is None or isinstance(plugin, FSDP2Precision) or plugin.precision in ("32-true", "bf16-true"):
        return plugin
    if isinstance(plugin, (MixedPrecision, HalfPrecision)) and plugin.precision in POLICIES:
        scaler = getattr(plugin, "scaler", None)
        return FSDP2Precision(plugin.precision, scaler and LossScaler.like(scaler, device), device)
    raise MisconfigurationException(
        f"precision={plugin.precision}: strategy fsdp2 takes 32-true, bf16-true or {', '.join(POLICIES)}."
    )
