"""One checkpoint at a time, written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundSave:
    """Writes one checkpoint at a time in a thread, for whose end the interpreter waits before it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._written: threading.Event | None = None
        self._failed: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._written is not None and not self._written.is_set()

    def begin(self, write: Callable[[], None]) -> None:
        """Wait for the checkpoint before, then start a thread that calls ``write``.

        Raises:
            BaseException: what the write before has raised.
        """
        self.finish()
        self._written = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(write, self._written), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None], written: threading.Event) -> None:
        try:
            write()
        except BaseException as error:  # raised in the training thread, by `finish`
            self._failed = error
        finally:
            written.set()

    def then(self, act: Callable[[], None]) -> None:
        """Call ``act`` when the checkpoint that is being written is on disk; at once if none is, never if it fails."""
        if self._thread is None:
            act()
        else:
            self._then.append(act)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and do what waits for it; raise what its write raised."""
        if self._written is None:
            return
        # No `join`: interrupted by a signal's exception, Python 3.11 takes the thread for ended, and does not wait for
        # it at exit either.
        self._written.wait()
        failed, self._thread, self._written, self._failed = self._failed, None, None, None
        waiting, self._then = self._then, []
        if failed is not None:
            raise failed
        for act in waiting:
            act()
