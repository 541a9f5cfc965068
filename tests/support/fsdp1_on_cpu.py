"""FSDP1 on CPU ranks. Lightning refuses it there by name; torch trains, saves and loads with it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from lit_stable.strategies.fsdp1 import FSDP1Strategy


class FSDP1OnCPU(FSDP1Strategy):
    """Lightning's own but for the device of a model that is wrapped: a number there, which a CPU has not."""

    def _setup_model(self, model: Module) -> Module:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return super()._setup_model(model)
        wrapped: Any = FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )
        return wrapped
