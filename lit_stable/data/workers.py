"""Data workers and signals: who ends whom."""

from __future__ import annotations

import atexit
import multiprocessing.util  # registers its own exit, which must come after ours
import signal


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
