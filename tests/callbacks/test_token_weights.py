"""Steps averaged over counted tokens; on two ranks in tests/distributed/test_warmups.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from tiny_fit import SaveAtSteps, Watch, adamw, assert_same_bits, quiet_trainer, snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import AccumulationWindows, BatchSizeWarmup, Progress
from lit_stable.callbacks.window_loss import WindowLoss

LENGTH, CLASSES = 6, 5


def padded(index: int) -> dict[str, Tensor]:
    """One sample, (LENGTH, 4) inputs and (LENGTH,) labels, of which 0 to 6 count."""
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(0, CLASSES, (LENGTH,), generator=generator)
    labels[(5 * index) % 7 :] = -100
    return {"inputs": torch.randn(LENGTH, 4, generator=generator), "labels": labels}


def stacked(first: int, size: int) -> dict[str, Tensor]:
    samples = [padded(first + i) for i in range(size)]
    return {name: torch.stack([s[name] for s in samples]) for name in ("inputs", "labels")}


class Padded(LightningModule):
    def __init__(self, micro_batch: int = 1, batches: int | None = None, fused: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(4, CLASSES)
        self.micro_batch, self.batches, self.fused = micro_batch, batches, fused

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def train_dataloader(self) -> Any:
        start, size, batches = Progress.of(self.trainer).position, self.micro_batch, self.batches

        class Stream(IterableDataset):
            def __iter__(self) -> Any:
                number = 0
                while batches is None or number < batches:
                    yield stacked(start + number * size, size)
                    number += 1

        return DataLoader(Stream(), batch_size=None)

    def configure_optimizers(self) -> Any:
        return adamw(lr=0.01, fused=self.fused)(self.parameters())


def by_hand(first: int, size: int) -> tuple[float, Tensor]:
    """Loss and weight gradient of one big batch."""
    module = Padded()
    loss = module.loss(stacked(first, size))
    loss.backward()
    return float(loss), module.net.weight.grad  # type: ignore[return-value]


class First(Watch):
    """The loss and the gradient of the first step."""

    def __init__(self) -> None:
        self.loss, self.window, self.gradient = 0.0, WindowLoss(), torch.empty(0)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.window.add(loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            self.loss, self.gradient = float(self.window.mean(trainer)), pl_module.net.weight.grad.clone()


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_step_is_the_mean_over_all_counted_tokens_of_its_window(micro_batch: int) -> None:
    first = First()
    windows = AccumulationWindows(8, micro_batch, average_over="tokens")
    quiet_trainer(windows, first, max_steps=1).fit(Padded(micro_batch))
    loss, gradient = by_hand(0, 8)
    assert first.loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(first.gradient, gradient, rtol=1e-5, atol=1e-7)


def test_otherwise_the_micro_batches_weigh_the_same() -> None:
    first = First()
    quiet_trainer(AccumulationWindows(8, 4), first, max_steps=1).fit(Padded(4))
    (_, left), (_, right) = by_hand(0, 4), by_hand(4, 4)
    torch.testing.assert_close(first.gradient, (left + right) / 2, rtol=1e-5, atol=1e-7)
    assert (first.gradient - by_hand(0, 8)[1]).abs().max() > 1e-3


def test_a_window_that_runs_dry_is_the_mean_over_what_it_held() -> None:
    first = First()
    trainer = quiet_trainer(AccumulationWindows(8, 1, "tokens"), first, max_steps=-1, max_epochs=1)
    trainer.fit(Padded(batches=5))
    torch.testing.assert_close(first.gradient, by_hand(0, 5)[1], rtol=1e-5, atol=1e-7)


def test_a_window_without_counted_tokens_moves_nothing_by_its_gradient() -> None:
    class Masked(Padded):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.loss({**batch, "labels": torch.full_like(batch["labels"], -100)})

        def count_targets(self, batch: dict[str, Tensor]) -> int:
            return 0

    first = First()
    quiet_trainer(AccumulationWindows(2, 1, "tokens"), first, max_steps=1).fit(Masked())
    assert torch.equal(first.gradient, torch.zeros_like(first.gradient))
    assert first.loss == 0.0


def test_a_ramp_weighs_likewise_and_counts_what_it_weighed(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    ramp = BatchSizeWarmup("2 for 1 steps", global_batch=4, micro_batch=2, average_over="tokens")
    quiet_trainer(ramp, first := First(), max_steps=2, logger=logger, log_every_n_steps=1).fit(Padded(2))
    torch.testing.assert_close(first.gradient, by_hand(0, 2)[1], rtol=1e-5, atol=1e-7)
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    counted = [row.split(",")[header.split(",").index("progress/counted_tokens")] for row in rows]
    assert [float(c) for c in counted] == [0 + 5, 3 + 1 + 6 + 4]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
def test_the_loss_scale_is_neither_lost_nor_counted(fused: bool) -> None:
    class Scaled(Padded):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.loss(batch)

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    first = First()
    trainer = quiet_trainer(AccumulationWindows(8, 2, "tokens"), first, max_steps=1, plugins=[plugin])
    trainer.fit(Scaled(2, fused=fused))
    loss, gradient = by_hand(0, 8)
    assert first.loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(first.gradient / (256 if fused else 1), gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("saved_at", [1, 3, 4])
def test_resumes_bit_for_bit_from_any_micro_batch(saved_at: int, tmp_path: Path) -> None:
    def fit(*others: Any, resume: Path | None = None) -> Any:
        trainer = quiet_trainer(AccumulationWindows(6, 2, "tokens"), *others, max_steps=3)
        trainer.fit(Padded(2, fused=False), ckpt_path=resume)
        return snapshot(trainer)

    straight = fit(SaveAtSteps(tmp_path))
    assert_same_bits(fit(resume=tmp_path / f"micro-{saved_at}.ckpt"), straight)


def test_a_host_that_shifts_its_labels_says_how_many_it_counts() -> None:
    class Shifts(Padded):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(self.net(batch["inputs"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

        def count_targets(self, batch: dict[str, Tensor]) -> Tensor:
            return (batch["labels"][:, 1:] != -100).sum()

    first, whole = First(), Shifts()
    quiet_trainer(AccumulationWindows(8, 2, "tokens"), first, max_steps=1).fit(Shifts(2))
    whole.loss(stacked(0, 8)).backward()
    torch.testing.assert_close(first.gradient, whole.net.weight.grad, rtol=1e-5, atol=1e-7)


def test_a_batch_without_labels_is_refused() -> None:
    class Pairs(Padded):
        def train_dataloader(self) -> Any:
            return DataLoader([(torch.zeros(1, 2), torch.zeros(1, 2))], batch_size=None)

    with pytest.raises(MisconfigurationException, match=r"batch of type list: .* define `count_targets\(batch\)"):
        quiet_trainer(AccumulationWindows(1, 1, "tokens"), max_steps=1).fit(Pairs())


def test_another_average_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`AccumulationWindows\(average_over='batches'\)`: .* tokens"):
        AccumulationWindows(4, 2, average_over="batches")  # type: ignore[arg-type]
