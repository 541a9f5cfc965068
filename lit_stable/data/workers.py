"""Loaders, their workers, and signals: who ends whom."""

from __future__ import annotations

import atexit
import multiprocessing.util  # registers its own exit, which must come after ours
import os
import signal
from threading import Thread
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

BatchT = TypeVar("BatchT")


def make_loader(dataset: IterableDataset[BatchT], num_workers: int, device: torch.device) -> DataLoader[BatchT]:
    """A loader of batches that come collated, read ahead by ``num_workers`` processes, for a ``device``."""
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=begin_worker,
        pin_memory=device.type == "cuda",
    )


def begin_worker(worker: int) -> None:
    """In a data worker: leave signals to the trainer, and end when it does.

    Ctrl-C and most launchers signal the whole process group; a worker that dies of SIGINT or SIGTERM takes the trainer
    down before it can save, so it ignores them. PyTorch's workers look whether their parent lives, but under
    ``forkserver``, which Python 3.14 takes by itself, that is a server that lives as long as they do: the workers of a
    trainer that was killed stayed for ever.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(trainer: multiprocessing.process.BaseProcess | None) -> None:
    if trainer is not None:
        trainer.join()
        os._exit(1)


@atexit.register
def end_data_workers() -> None:
    """Kill the workers that are left when the process ends.

    After an error the loader may never be closed. multiprocessing's own exit sends its children the SIGTERM that they
    ignore, and waits for ever; this runs before it, having been registered later.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
