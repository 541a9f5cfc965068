"""What one process can see; that all ranks end together is in tests/distributed/test_warmups.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_fit import TinyModule, Watch, quiet_trainer, sample
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import AccumulationWindows
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.even_epochs import LaterJudged, _judge_interval, end_with_the_shortest


def cut_to(shortest: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a rank does that holds seven batches when another holds fewer."""

    def agree(trainer: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.strategy), "reduce", lambda *rest, **named: torch.tensor([shortest, -7]))
            patch.setattr(type(trainer), "world_size", 2)
            end_with_the_shortest(trainer)

    return Watch("on_train_start", agree)


@pytest.mark.parametrize(("shortest", "validated"), [(5, [2, 4]), (7, [3, 6])])
def test_a_share_of_an_epoch_is_a_share_of_the_shortest(
    shortest: int, validated: list[int], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    trainer = quiet_trainer(cut_to(shortest, monkeypatch), max_steps=-1, max_epochs=1, val_check_interval=0.5)
    module = TinyModule()
    batches = DataLoader([sample(i)[None] for i in range(7)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, batches, batches)
    assert trainer.global_step == shortest
    assert module.validated_after == validated
    told = [str(w.message) for w in recwarn if "training loaders of" in str(w.message)]
    assert [line.startswith("training loaders of 5 to 7 batches on 2 ranks") for line in told] == [True] * (
        7 - shortest > 0
    )


@pytest.mark.parametrize(("every", "refused"), [(LaterJudged(5), False), (LaterJudged(6), True), (6, False)])
def test_of_unequal_loaders_the_interval_is_at_most_the_shortest(every: int, refused: bool) -> None:
    trainer = quiet_trainer(limit_val_batches=1)
    trainer.val_check_batch, trainer.check_val_every_n_epoch = every, 1
    with pytest.raises(MisconfigurationException, match=r"val_check_interval=6\)") if refused else nullcontext():
        _judge_interval(trainer, 5)
    assert type(trainer.val_check_batch) is int


class ReadOnce(IterableDataset[torch.Tensor]):
    """Batches that are gone when they were read."""

    def __init__(self, batches: int) -> None:
        self.batches = [sample(i)[None] for i in range(batches)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.batches:
            yield self.batches.pop()


@pytest.mark.parametrize(("batches", "epoch", "limit"), [(0, 0, None), (4, 1, None), (4, 2, 2)])
def test_a_stream_that_is_read_once_ends_a_run_of_steps_with_a_sentence(
    batches: int, epoch: int, limit: int | None
) -> None:
    """Lightning goes through one empty epoch after the other, for ever."""
    trainer = quiet_trainer(AccumulationWindows(2, 1), max_steps=5, limit_train_batches=limit)
    with pytest.raises(MisconfigurationException, match=f"^training loader: no batch in epoch {epoch}; let its"):
        trainer.fit(TinyModule(), DataLoader(ReadOnce(batches), batch_size=None))
    assert trainer.global_step == batches // 2
