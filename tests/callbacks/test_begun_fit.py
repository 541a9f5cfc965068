"""A fit that goes on within an accumulation window of a finite epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, sample, snapshot
from torch.utils.data import DataLoader

from lit_stable.callbacks import AccumulationWindows, Progress, ResumingBatches, StepSeed

EPOCH = 5  # micro-batches, in windows of 3 and 2


class FromPosition(TinyData):
    """A data set of 40 samples, one at a time, from where the run stands."""

    def train_dataloader(self) -> Any:
        data = torch.stack([sample(i) for i in range(40)])
        return DataLoader(data, batch_sampler=ResumingBatches(self.trainer, len(data), 1))  # type: ignore[arg-type]


def two_epochs(callbacks: list[Any], checkpoint: Path | None = None, **options: Any) -> tuple[Any, list[Any]]:
    """The trainer, and (steps, place in the epoch) at the end of each micro-batch."""
    places: list[Any] = []
    watch = Watch("on_train_batch_end", lambda t, *rest: places.append((Progress.of(t).steps, rest[-1])))
    options = {"max_epochs": 2, "limit_train_batches": EPOCH, **options}
    trainer = quiet_trainer(*callbacks, watch, StepSeed(), max_steps=-1, **options)
    trainer.fit(TinyModule(dropout=0.5), FromPosition(validation_batches=1), ckpt_path=checkpoint)
    return trainer, places


@pytest.mark.parametrize("lightnings_own", [False, True])
def test_an_epoch_resumed_within_a_window_ends_where_it_would_have(lightnings_own: bool, tmp_path: Path) -> None:
    """With validation behind the first window of each epoch, and behind the first micro-batch of the second one."""

    def windows() -> list[Any]:
        return [Progress()] if lightnings_own else [AccumulationWindows(3, 1)]

    options = {"accumulate_grad_batches": 3 if lightnings_own else 1, "val_check_interval": 3}
    straight, places = two_epochs([*windows(), SaveAtSteps(tmp_path)], **options)
    assert places == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 0), (2, 1), (3, 2), (3, 3), (4, 4)]
    for saved_at, window_begins in ((2, 0), (4, 3), (7, 5), (9, 8)):
        resumed, replayed = two_epochs(windows(), tmp_path / f"micro-{saved_at}.ckpt", **options)
        assert replayed == places[window_begins:]
        validated = resumed.lightning_module.validated_after
        assert validated == straight.lightning_module.validated_after[-len(validated) or 2 :]
        assert Progress.of(resumed).mark == Progress.of(straight).mark
        assert resumed.current_epoch == straight.current_epoch
        assert_same_bits(snapshot(resumed), snapshot(straight), f"saved at {saved_at}")


def test_a_window_that_was_open_in_a_validation_or_an_exception_is_replayed_too(tmp_path: Path) -> None:
    """Validation behind every micro-batch, so also where the window began; the fit fails in the epoch's last batch."""
    options = {"val_check_interval": 1}
    straight, places = two_epochs([AccumulationWindows(3, 1)], **options)

    def fail(trainer: Any, *rest: Any) -> None:
        if rest[-1] == EPOCH - 1:
            raise RuntimeError

    def save(trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.fit_loop.epoch_loop.batch_idx}-{len(rest)}.ckpt")

    watches = [Watch(hook, save) for hook in ("on_validation_batch_end", "on_validation_end", "on_exception")]
    with pytest.raises(RuntimeError):
        two_epochs([AccumulationWindows(3, 1), *watches, Watch("on_train_batch_start", fail)], **options)
    saved = sorted(tmp_path.glob("*.ckpt"))
    assert [file.stem for file in saved if file.stem[0] in "34"] == ["3-0", "3-3", "4-1"]
    for file in saved[-3:]:
        resumed, replayed = two_epochs([AccumulationWindows(3, 1)], file, **options)
        assert replayed == places[3:], file
        assert_same_bits(snapshot(resumed), snapshot(straight), str(file))


class Stateful(DataLoader[Any]):
    """Says where it is, as some loaders do."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_loader_with_a_state_of_its_own_goes_on_behind_the_window_which_is_said(tmp_path: Path) -> None:
    def fit(*callbacks: Any, checkpoint: Path | None = None) -> Any:
        trainer = quiet_trainer(AccumulationWindows(3, 1), *callbacks, max_steps=-1, max_epochs=1)
        loader = Stateful([sample(i)[None] for i in range(EPOCH)], batch_size=None)  # type: ignore[arg-type]
        trainer.fit(TinyModule(), loader, ckpt_path=checkpoint)
        return trainer

    fit(SaveAtSteps(tmp_path))
    with pytest.warns(UserWarning, match="goes on behind the 2 micro-batches begun by then: they are not trained on"):
        fit(checkpoint=tmp_path / "micro-2.ckpt")
