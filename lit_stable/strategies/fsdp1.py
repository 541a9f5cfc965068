"""Lightning's FSDP (torch's first kind, GPUs only), told what a block of our GPT is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.model.gpt import Block
from lit_stable.strategies.loss_scale import LossScaler
from lit_stable.strategies.resharding import ReshardsAfterEvaluation


class FSDP1Strategy(ReshardsAfterEvaluation, FSDPStrategy):
    """``strategy: fsdp``: Lightning's ``FSDPStrategy`` with one unit per block.

    Under bf16-mixed and 16-mixed it casts norm weights to 16 bits in the forward pass as well (``fsdp2`` does not). It
    runs on CUDA devices only; Lightning refuses others. Each micro-batch is reduced; Lightning's own waits for the last
    of a window, and until then a rank holds whole gradients, added up in 16 bits under mixed precision. Under 16-mixed
    its gradient scaler is replaced by one on whose finding all ranks agree: torch's own does not ask the other ranks
    when the optimizer is fused.

    Args:
        options: What ``FSDPStrategy`` takes; ``auto_wrap_policy`` defaults to one unit per block and
            ``state_dict_type`` to ``sharded``.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("auto_wrap_policy", {Block})
        options.setdefault("state_dict_type", "sharded")
        super().__init__(**options)

    def setup_environment(self) -> None:
        super().setup_environment()
        if problem := one_device_problem(str(self.precision_plugin.precision), self.world_size):
            raise MisconfigurationException(problem)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Nothing waits for the last micro-batch of a window."""
        yield

    @property
    def precision_plugin(self) -> FSDPPrecision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        FSDPStrategy.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]
        if isinstance(plugin, FSDPPrecision) and plugin.scaler is not None:
            plugin.scaler = LossScaler.like(plugin.scaler, "cuda")  # type: ignore[assignment]


def one_device_problem(precision: str, ranks: int) -> str | None:
    """Why FSDP1 does not train on these ranks; ``None``: it does.

    Not sharding, on one rank, it keeps the gradient of a micro-batch in 16 bits beside fp32 parameters, which torch
    2.11 refuses at the next micro-batch with a traceback.
    """
    if ranks > 1 or precision not in ("bf16-mixed", "16-mixed"):
        return None
    return (
        f"trainer.precision={precision}: strategy fsdp on one device keeps gradients in 16 bits beside fp32 weights,"
        " which torch refuses; take strategy auto or fsdp2, or more devices."
    )


def register_strategies() -> None:
    """Let ``strategy: fsdp`` mean the class above."""
    StrategyRegistry.register("fsdp", FSDP1Strategy, description="FSDP1, one unit per block", override=True)
