"""Loaders, their workers, and signals: who ends whom."""

from __future__ import annotations

import atexit
import multiprocessing.util  # registers its own exit, which must come after ours
import signal
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
        worker_init_fn=leave_signals_to_the_trainer,
        pin_memory=device.type == "cuda",
    )


def leave_signals_to_the_trainer(worker: int) -> None:
    """Ignore SIGINT and SIGTERM, in a data worker.

    Ctrl-C and most launchers signal the whole process group; a worker that dies takes the trainer down before it can
    save. A worker ends by itself when the loader or its parent does.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def end_data_workers() -> None:
    """Kill the workers that are left when the process ends.

    After an error the loader may never be closed. multiprocessing's own exit sends its children the SIGTERM that they
    ignore, and waits for ever; this runs before it, having been registered later.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
