"""Lightning's FSDP (torch's first kind, GPUs only), told what a block of our GPT is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

from lit_stable.model.gpt import Block


class FSDP1Strategy(FSDPStrategy):
    """``strategy: fsdp``: Lightning's ``FSDPStrategy`` with one unit per block.

    Under bf16-mixed it casts norm weights to bf16 in the forward pass as well (``fsdp2`` does not). It runs on CUDA
    devices only; Lightning refuses others.

    Args:
        options: What ``FSDPStrategy`` takes; ``auto_wrap_policy`` defaults to one unit per block and
            ``state_dict_type`` to ``sharded``.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("auto_wrap_policy", {Block})
        options.setdefault("state_dict_type", "sharded")
        super().__init__(**options)


def register_strategies() -> None:
    """Let ``strategy: fsdp`` mean the class above."""
    StrategyRegistry.register("fsdp", FSDP1Strategy, description="FSDP1, one unit per block", override=True)
