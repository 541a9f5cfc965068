from __future__ import annotations

from typing import Any

import pytest
from hosts import Gan, Manual, loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tiny_fit import quiet_trainer

from lit_stable.callbacks import GradNorm, LayerNormFreeze, Progress, ValidateEverySteps


@pytest.mark.parametrize(
    "callback", [Progress, GradNorm, lambda: LayerNormFreeze([{"stop": 9}]), lambda: ValidateEverySteps(2)]
)
def test_an_optimizer_that_is_stepped_behind_lightnings_back_is_refused_at_its_first_step(callback: Any) -> None:
    trainer = quiet_trainer(callback(), check_val_every_n_epoch=None)
    with pytest.raises(
        MisconfigurationException,
        match=r"`Manual\.training_step`: .*; step what `self\.optimizers\(\)` returns, without",
    ):
        trainer.fit(Manual(raw=True), loader())
    assert trainer.fit_loop.total_batch_idx == 0
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


@pytest.mark.parametrize("module", [Manual, Gan])
def test_one_that_is_stepped_by_lightnings_wrapper_is_not(module: Any) -> None:
    trainer = quiet_trainer(Progress(), max_steps=-1, max_epochs=1)
    trainer.fit(module(), loader())
    assert Progress.of(trainer).steps == 3


def test_a_batch_on_which_nothing_steps_is_no_reason() -> None:
    class Accumulates(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            if batch_idx == 2:
                self.optimizers().step()  # type: ignore[union-attr]

    trainer = quiet_trainer(Progress(), max_steps=-1, max_epochs=1)
    trainer.fit(Accumulates(), loader())
    assert (Progress.of(trainer).steps, Progress.of(trainer).samples) == (1, 10)
