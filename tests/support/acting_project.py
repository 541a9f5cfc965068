"""Every callback that acts, in a project that knows it by any name, in either namespace. Imports no lit_stable."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

STEPS, MICRO_BATCH, GLOBAL_BATCH, LENGTH, FEATURES = 4, 2, 8, 4, 4


class Batches(IterableDataset[Tensor]):
    """Endless micro-batches (MICRO_BATCH, LENGTH, FEATURES) from a sample on; sample k is a function of k."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[Tensor]:
        first = self.start
        while True:
            yield torch.stack([_sample(first + j) for j in range(MICRO_BATCH)])
            first += MICRO_BATCH


def _sample(number: int) -> Tensor:
    return torch.randn(LENGTH, FEATURES, generator=torch.Generator().manual_seed(number))


class First(nn.Linear):
    """A layer with one head of attention, whose queries are its keys."""

    key_heads = 1

    def rows_of_heads(self, q: Tensor, k: Tensor) -> list[tuple[nn.Module, Tensor]]:
        return [(self, (q * k).sqrt().expand(self.out_features))]

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        y = nn.functional.linear(x, self.weight, self.bias)[:, None]
        return y, y, 1.0


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(First(FEATURES, width), nn.LayerNorm(width), nn.Dropout(0.3), nn.Linear(width, FEATURES))


class Project:
    """The project in one namespace of Lightning, with the callbacks of one package."""

    def __init__(self, namespace: str, package: str, folder: Path) -> None:
        self.lightning = importlib.import_module(namespace)
        self.package, self.folder = package, folder
        self.without = functools.cache(lambda width: self.fit([], width))

    def callback(self, path: str, **arguments: Any) -> Any:
        """By its path in the package: ``module.Class``."""
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"{self.package}.{module}"), name)(**arguments)

    def module(self, width: int) -> Any:
        class Module(self.lightning.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = network(width)

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                loss: Tensor = (self.net(batch) - batch.roll(1, dims=-1)).square().mean()
                return loss * (1e4 if self.trainer.global_step == 1 else 1.0)

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, fused=True)
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        return Module()

    def data(self) -> Any:
        progress = importlib.import_module(f"{self.package}.progress").Progress

        class Data(self.lightning.LightningDataModule):  # type: ignore[name-defined,misc]
            def train_dataloader(self) -> DataLoader[Tensor]:
                return DataLoader(Batches(progress.of(self.trainer).position), batch_size=None)

        return Data()

    def beside(self, saves: Path | None) -> Any:
        """A callback of the project's own, which knows of a spike after the second step, and saves within the third."""
        events = importlib.import_module(f"{self.package}.events")

        class Beside(self.lightning.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if trainer.global_step != 2:
                    return
                if batch_idx == self.last + 1 and saves is not None:
                    trainer.save_checkpoint(saves)
                if self.last < 0:
                    events.emit(trainer, events.Event(2, "spike", {}))
                    self.last = batch_idx

            last = -1

        return Beside()

    def fit(self, ours: list[Any], width: int, saves: Path | None = None, resume: Path | None = None) -> list[Tensor]:
        """The weights and the optimizer's state after four steps; the generators' state before must not matter."""
        torch.manual_seed(99 if resume is None else 1234)
        company = [self.callback("step_seed.StepSeed", seed=1)]
        if not any(hasattr(one, "micro_batch") for one in ours):  # an AccumulationWindows, or what stands in for it
            company.append(self.callback("accumulation.AccumulationWindows", **_WINDOWS))
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = self.lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=STEPS,
            max_epochs=-1,
            enable_model_summary=False,
            default_root_dir=self.folder,
            callbacks=[self.beside(saves), *ours, *company],
            **options,
        )
        trainer.fit(self.module(width), datamodule=self.data(), ckpt_path=resume)
        assert trainer.global_step == STEPS
        held = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        return [t.detach().clone() for t in [*trainer.lightning_module.parameters(), *held] if isinstance(t, Tensor)]

    def try_one(self, path: str, case: dict[str, Any]) -> None:
        """It acts, resumes bit for bit from within a window, and with ``action: log`` changes no bit."""

        def own(**more: Any) -> list[Any]:
            others = [self.callback(other, **given) for other, given in case["beside"].items()]
            return [*others, self.callback(path, **{**case["acts"], **more})]

        width, saved = case["width"], self.folder / f"{path}.ckpt"
        straight = self.fit(own(), width, saves=saved)
        without = self.without(width)
        assert not same(straight, without), "does nothing"
        assert same(self.fit(own(), width, resume=saved), straight), "does not resume bit for bit"
        if case["logs"]:
            assert same(self.fit(own(action="log"), width), without), "acts under action: log"


_WINDOWS = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """To the bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


def wrong(namespace: str, package: str, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, str]:
    """What is wrong with a callback, by its path; nothing for one that does its work."""
    project, found = Project(namespace, package, folder), {}
    for path, case in cases.items():
        try:
            project.try_one(path, case)
        except Exception:
            found[path] = traceback.format_exc()
    return found
