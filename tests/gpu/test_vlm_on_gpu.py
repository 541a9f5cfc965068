"""New blocks between the layers of a frozen model on a GPU, compiled layers and 16 bits included."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from tiny_gpt_run import fit
from tiny_vlm_run import PairData, vlm_module

from lit_stable.callbacks import ActivationMonitor, LayerNormFreeze

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("compiles", ["off", "on"])
def test_new_blocks_train_and_backbones_stay_bit_for_bit(strategy, precision, compiles):
    module = vlm_module(qk_norm="rmsnorm")
    module.compile_option = compiles
    before = {}

    class Remember(Callback):
        def on_train_start(self, trainer, pl_module):
            before.update({name: whole(p) for name, p in pl_module.named_parameters()})

    rules = [{"modules": ["gpt", "sight.vision"], "norms": "with"}]
    callbacks = (LayerNormFreeze(rules), Remember(), ActivationMonitor())
    options = {"accelerator": "cuda", "precision": precision, "data": PairData(), "callbacks": callbacks}
    run = fit(strategy, steps=4, module=module, **options)
    moved = {name for name, p in run.module.named_parameters() if not torch.equal(whole(p), before[name])}
    assert moved == {name for name in before if name.startswith("sight.blocks")}
    assert all(row[1] < 6 for row in run.rows)  # log 64 is 4.16


def whole(parameter: torch.Tensor) -> torch.Tensor:
    gathered = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return gathered.detach().cpu().clone()
