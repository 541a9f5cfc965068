"""How far `prepare` is: one line that rewrites itself on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from lit_stable.data.text.tokenising import Advance

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 30.0


class ProgressLine:
    """Context manager that shows share, amounts, speed and time left.

    Speed and time left are of this process: what an earlier one finished counts as done, not as fast.

    Args:
        name: Stands in front.
        total: Bytes of the input on disk.
        done: Of these, what was finished before.
        report: Receives lines where there is no terminal.
        terminal: The stream; only one that is a terminal is written to.
        clock: Seconds.
    """

    def __init__(
        self,
        name: str,
        total: int,
        done: int,
        report: Callable[[str], None],
        terminal: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._total, self._before, self._report = name, total, done, report
        stream = sys.stdout if terminal is None else terminal
        self._terminal = stream if stream.isatty() else None
        self._clock = clock
        self._start = self._shown = clock()
        self._sum = Advance(0, 0, 0, 0)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()

    def advance(self, step: Advance) -> None:
        """Count what was done, and show it when it is time."""
        self._sum = Advance(*(a + b for a, b in zip(self._sum, step, strict=True)))
        now = self._clock()
        if now - self._shown < (LOG_SECONDS if self._terminal is None else TERMINAL_SECONDS):
            return
        self._shown = now
        if self._terminal is None:
            self._report(self.line(now - self._start))
        else:
            self._terminal.write(f"\r{self.line(now - self._start)}\x1b[K")
            self._terminal.flush()

    def line(self, seconds: float) -> str:
        """The line after so many seconds."""
        raw, num_bytes, documents, tokens = self._sum
        done = min(self._total, self._before + raw)
        seconds = max(seconds, 1e-9)
        left = (self._total - done) * seconds / raw if raw else None
        share = f"{done / self._total:.0%}, " if self._total else ""
        return (
            f"{self._name}: {share}{documents:,} documents, {num_bytes / 1e6:,.1f} MB, "
            f"{tokens:,} tokens; {documents / seconds:,.0f} documents/s, {num_bytes / 1e6 / seconds:.1f} MB/s"
            + (f", {_clock_time(left)} left" if left is not None else "")
        )


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
