"""Loaders, their workers, and signals: who ends whom."""

from __future__ import annotations

import atexit
import multiprocessing.util  # registers its own exit, which must come after ours
import os
import signal
from threading import Thread
from typing import TypeVar
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks.stop_signals import STOPPING, number_of

BatchT = TypeVar("BatchT")


def make_loader(dataset: IterableDataset[BatchT], num_workers: int, device: torch.device) -> DataLoader[BatchT]:
    """A loader of batches that come collated, read ahead by ``num_workers`` processes, for a ``device``."""
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=BeginWorker(num_workers) if num_workers else None,
        pin_memory=device.type == "cuda",
    )


class BeginWorker:
    """In a data worker: say which process it is, leave signals to the trainer, and end when it does.

    Ctrl-C, launchers and schedulers signal the whole process group; a worker that dies of what ``GracefulStop`` heeds
    takes the trainer down before it can save, so it ignores that. PyTorch's workers look whether their parent lives,
    but under ``forkserver``, which Python 3.14 takes by itself, that is a server that lives as long as they do: the
    workers of a trainer that was killed stayed for ever.

    Args:
        num_workers: Of one loader, whose processes keep this object as long as they live.

    Attributes:
        pids: The process of each worker, 0 until it has begun; memory that it and the trainer have in common.
    """

    def __init__(self, num_workers: int) -> None:
        self.pids = torch.zeros(num_workers, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        _BEGUN.add(self)

    def __call__(self, worker: int) -> None:
        self.pids[worker] = os.getpid()  # first: from the next line on the trainer must know whom to end
        for name in STOPPING:
            signal.signal(number_of(name), signal.SIG_IGN)
        Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


_BEGUN: WeakSet[BeginWorker] = WeakSet()


def _end_with(trainer: multiprocessing.process.BaseProcess | None) -> None:
    if trainer is not None:
        trainer.join()
        os._exit(1)


@atexit.register
def end_data_workers() -> None:
    """Kill the workers of our loaders that are left when the process ends, and no other child of it.

    After an error the loader may never be closed. multiprocessing's own exit sends its children the SIGTERM that they
    ignore, and waits for ever; this runs before it, having been registered later.
    """
    ours = {pid for begun in _BEGUN for pid in begun.pids.tolist()}
    for child in multiprocessing.active_children():
        if child.daemon and child.pid in ours:
            child.kill()
