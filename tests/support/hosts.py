"""Projects of other people's making, as the callbacks meet them: modules, loaders and optimizers of many kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from tiny_fit import WIDTH, adamw, sample
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

ROWS, BATCH = 10, 4  # three batches in an epoch, the last of two samples


class Rows(Dataset[Any]):
    """Finite data; ``shape`` makes of a sample what the project hands out."""

    def __init__(self, shape: Any = lambda row, index: row) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.shape(sample(index), index)


class Stream(IterableDataset[Tensor]):
    """The same samples without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([sample(index) for index in range(ROWS)])


@dataclass
class Record:
    label: Tensor
    row: Tensor


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows() if dataset is None else dataset, **{"batch_size": BATCH, **options})


def as_records(rows: list[Tensor]) -> Record:
    return Record(torch.zeros(len(rows)), torch.stack(rows))


class Host(LightningModule):
    """Learns to predict a shifted row, from the widest tensor of its batch; a foreach AdamW, as torch makes it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, WIDTH))

    def loss(self, batch: Any) -> Tensor:
        while not isinstance(batch, Tensor):
            batch = batch.row if isinstance(batch, Record) else batch["row"] if isinstance(batch, dict) else batch[0]
        error: Tensor = self.net(batch) - batch.roll(1, dims=1)
        return error.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return adamw(fused=None)(self.parameters())


class Manual(Host):
    """Takes its own steps, by Lightning's wrapper or behind its back."""

    def __init__(self, raw: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.raw = False, raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=not self.raw)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Gan(Host):
    """Two networks with an optimizer each; the second steps on every batch, the first on every other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        maker, judge = self.optimizers()  # type: ignore[misc]
        if batch_idx % 2:
            self.toggle_optimizer(maker)
            maker.zero_grad()
            self.manual_backward(-self.judge(self.net(batch)).mean())
            maker.step()
            self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        judge.zero_grad()
        self.manual_backward((self.judge(self.net(batch)).mean() - self.judge(batch).mean()).tanh())
        judge.step()
        self.untoggle_optimizer(judge)

    def configure_optimizers(self) -> Any:
        return [adamw(fused=None)(self.net.parameters()), torch.optim.SGD(self.judge.parameters(), lr=0.01)]


class LowRank(Host):
    """A frozen network with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.extra = nn.Sequential(nn.Linear(WIDTH, 2), nn.LayerNorm(2), nn.Linear(2, WIDTH))

    def loss(self, batch: Any) -> Tensor:
        error: Tensor = self.net(batch) + self.extra(batch) - batch.roll(1, dims=1)
        return error.square().mean()

    def configure_optimizers(self) -> Any:
        return adamw(fused=None)([p for p in self.parameters() if p.requires_grad])


class ByEpochs(Host):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


class OwnClipping(Host):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class CutsEpochsShort(Host):
    """Ends every epoch within its second batch, by the hook that Lightning has for it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # type: ignore[override]
        return -1 if batch_idx == 1 else None


class WithholdsSteps(Host):
    """Runs the closure of every second step without a step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            closure()
        else:
            optimizer.step(closure=closure)


class Protocol:
    """An optimizer that Lightning takes and torch does not know: it has no hooks around its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict
        self.zero_grad, self.step = inner.zero_grad, inner.step


class Wrapper(torch.optim.Optimizer):
    """A torch optimizer that shares its groups with one inside, which takes the steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)
