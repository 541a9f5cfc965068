"""Time spent training, without the pauses."""

from __future__ import annotations

import time


class IntervalClock:
    """Tokens per second of training time: between two readings, and over all but the first interval, which compiles."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of the last interval
        self._running = self._total = self._rate = 0.0
        self._tokens = self._first = 0
        self._since: float | None = None
        self._warm = False

    def start(self, tokens: int) -> None:
        """Begin at a token count."""
        self._tokens = self._first = tokens
        self.seconds = self._running = self._total = self._rate = 0.0
        self._warm = False
        self.go_on()

    def pause(self) -> None:
        """Stop counting time."""
        if self._since is not None:
            self._running += time.perf_counter() - self._since
            self._since = None

    def go_on(self) -> None:
        """Count time again."""
        self._since = time.perf_counter()

    def interval(self, tokens: int) -> float:
        """Tokens/s since the last call."""
        self.pause()
        self.seconds = max(self._running, 1e-9)
        self._rate = (tokens - self._tokens) / self.seconds
        if self._warm:
            self._total += self._running
        else:
            self._warm, self._first = True, tokens
        self._running, self._tokens = 0.0, tokens
        self.go_on()
        return self._rate

    def overall(self, tokens: int) -> float:
        """Tokens/s since the first call of ``interval``, or of that interval while there is no other."""
        if tokens > self._tokens:
            self.interval(tokens)
        return (tokens - self._first) / self._total if self._total else self._rate
