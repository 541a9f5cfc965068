"""Steps averaged over counted tokens on one CUDA device: no step waits for it, in any precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from no_sync import NoSync
from tiny_fit import TinyData, TinyModule, adamw, quiet_trainer
from torch import Tensor

from lit_stable.callbacks import AccumulationWindows, GradClip, GradSpikeSkip

pytestmark = pytest.mark.gpu


class Counting(TinyModule):
    """Of a batch of samples the positive numbers count."""

    def count_targets(self, batch: Tensor) -> Tensor:
        return (batch > 0).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        counted = batch > 0
        errors = (self.net(batch) - batch.roll(1, dims=1)).square() * counted
        return errors.sum() / counted.sum().clamp(min=1)


def weights(accelerator: str = "gpu", precision: Any = "32-true", *others: Any) -> Tensor:
    module = Counting(adamw(lr=1e-3))
    own = [AccumulationWindows(6, 2, average_over="tokens"), GradSpikeSkip(signal="both"), GradClip(0.5), *others]
    options = {"accelerator": accelerator, "max_steps": 8, "log_every_n_steps": 100, "precision": precision}
    quiet_trainer(*own, **options).fit(module, TinyData())
    return module.net[0].weight.detach().cpu()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_step_waits_for_the_device(precision: str) -> None:
    weights("gpu", precision, NoSync(3, 7))


def test_the_weights_are_those_of_a_cpu() -> None:
    torch.testing.assert_close(weights(), weights("cpu"), rtol=1e-4, atol=1e-6)
