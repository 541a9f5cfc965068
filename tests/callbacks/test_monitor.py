from __future__ import annotations

import pytest
from tiny_fit import TinyData, TinyModule, quiet_trainer

from lit_stable.callbacks import WeightMonitor
from lit_stable.callbacks.base import MisconfigurationException


def test_every_steps_must_be_at_least_1() -> None:
    with pytest.raises(MisconfigurationException, match=r"`WeightMonitor\(every_steps=0\)`: must be at least 1"):
        WeightMonitor(every_steps=0)


def test_a_trainer_that_never_logs_is_refused() -> None:
    trainer = quiet_trainer(WeightMonitor(), log_every_n_steps=0)
    with pytest.raises(MisconfigurationException, match=r"log_every_n_steps=0\)`: nothing is ever logged"):
        trainer.fit(TinyModule(), TinyData())


@pytest.mark.parametrize(("every", "steps"), [(None, [2, 4, 6]), (1, [2, 4, 6]), (3, [4]), (4, [4]), (5, [6])])
def test_it_measures_at_its_steps_alone(every: int | None, steps: list[int]) -> None:
    measured: list[int] = []

    class Noting(WeightMonitor):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):  # type: ignore[no-untyped-def]
            if self.is_due(trainer):
                measured.append(trainer.global_step + 1)

        def on_train_batch_end(self, trainer, pl_module, *args):  # type: ignore[no-untyped-def]
            if self.has_ended(trainer):
                measured.append(-trainer.global_step)

    trainer = quiet_trainer(Noting(every), max_steps=6, log_every_n_steps=2, accumulate_grad_batches=2)
    trainer.fit(TinyModule(), TinyData())
    assert measured == [sign * step for step in steps for sign in (1, -1)]
