from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hosts import Host, loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_fit import quiet_trainer

from lit_stable.callbacks import (
    EffectiveLR,
    GradClip,
    GradNorm,
    GradSpikeSkip,
    LayerNormFreeze,
    LROverride,
    OptimizerReset,
    Progress,
    StepSeed,
)


class EngineStrategy(SingleDeviceStrategy):
    """Is known by what it has, as DeepSpeed's is in either namespace."""

    @property
    def deepspeed_engine(self) -> Any:
        return self.model


def fit(callback: Any) -> Any:
    trainer = quiet_trainer(callback, strategy=EngineStrategy("cpu"), max_steps=2)
    trainer.fit(Host(), loader())
    return trainer


@pytest.mark.parametrize(
    ("callback", "who"),
    [
        (GradNorm, "GradNorm"),
        (GradClip, "GradNorm"),
        (GradSpikeSkip, "GradNorm"),
        (EffectiveLR, "EffectiveLR"),
        (lambda: LROverride(factor=0.5), "EffectiveLR"),
        (lambda: OptimizerReset(start=1), "EffectiveLR"),
        (lambda: LayerNormFreeze([{"stop": 1}]), "LayerNormFreeze"),
    ],
)
def test_an_engine_that_takes_the_step_is_refused(callback: Any, who: str) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"`EngineStrategy`: .* `{who}` would do nothing; use strategy="
    ):
        fit(callback())


def test_what_needs_no_step_works_there() -> None:
    assert fit(StepSeed()).global_step == 2


@pytest.mark.parametrize("callback", [GradClip, EffectiveLR])
def test_an_optimizer_without_hooks_around_its_step_is_refused(callback: Any) -> None:
    trainer = quiet_trainer(acting := callback())
    Progress.of(trainer)
    trainer.strategy._optimizers = [SimpleNamespace(param_groups=[])]
    with pytest.raises(MisconfigurationException, match=r"`SimpleNamespace`: is no torch.optim.Optimizer and has no"):
        acting.on_train_start(trainer, Host())
