"""Pins the names of ``private_fsdp_names.py``."""

from __future__ import annotations

import inspect

import torch

from lit_stable.callbacks import private_fsdp_names


def test_fsdp1_keeps_shards_under_these_names() -> None:
    """FSDP1 wants an accelerator, so its parts are looked at one by one; on GPUs a distributed test runs them."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _common_utils, _flat_param, _runtime_utils

    state = vars(_common_utils._FSDPState())
    assert state["_handle"] is None
    assert state["process_group"] is None
    assert isinstance(inspect.getattr_static(_flat_param.FlatParamHandle, "uses_sharded_strategy"), property)
    assert "self._use_orig_params" in inspect.getsource(_flat_param.FlatParamHandle.__init__)
    assert "_params" in _flat_param.FlatParameter.__annotations__
    plain = torch.nn.Linear(2, 2)
    assert FullyShardedDataParallel.fsdp_modules(plain) == []
    assert private_fsdp_names.fsdp1_shards(plain) == (set(), None)
    assert list(inspect.signature(_runtime_utils._reshard).parameters) == [
        *("state", "handle", "free_unsharded_flat_param"),
    ]
    assert callable(_flat_param.FlatParamHandle.needs_unshard)
    private_fsdp_names.reshard_fsdp1(plain)


def test_the_next_fit_can_take_the_wrapper_of_the_last() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    assert list(inspect.signature(FSDPStrategy._setup_model).parameters) == ["self", "model"]
    assert "self.model = self._setup_model(self.model)" in inspect.getsource(FSDPStrategy.setup)
