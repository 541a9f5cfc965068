"""Where in the endless sample stream a run stands, when some of the stream has been dropped.

The stream is the sequence 0, 1, 2, ... of sample indices before any dropping. A run that has consumed ``n`` samples
reads next the sample at ``stream_position(n, dropped)``: consumed counts never advance over dropped data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]  # [start, stop) in stream positions


def merge_ranges(ranges: Iterable[Sequence[int]]) -> list[Range]:
    """Sort half-open ranges and join those that touch or overlap.

    Raises:
        ValueError: when a range is empty, reversed or starts below 0.
    """
    merged: list[Range] = []
    for start, stop in sorted((int(a), int(b)) for a, b in ranges):
        if start < 0 or stop <= start:
            raise ValueError(f"range [{start}, {stop}): must be non-empty and start at 0 or later.")
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def stream_position(consumed: int, dropped: Sequence[Range]) -> int:
    """Stream position of the sample that follows ``consumed`` kept ones; ``dropped`` sorted and merged.

    Example::

        >>> [stream_position(n, [(2, 5)]) for n in range(4)]
        [0, 1, 5, 6]
    """
    position = consumed
    for start, stop in dropped:
        if position < start:
            break
        position += stop - start
    return position


def consumed_before(position: int, dropped: Sequence[Range]) -> int:
    """Kept samples in front of a stream position that no dropped range holds inside; ``dropped`` sorted and merged.

    Example::

        >>> [consumed_before(position, [(2, 5)]) for position in (0, 1, 2, 5, 6)]
        [0, 1, 2, 2, 3]
    """
    return position - sum(stop - start for start, stop in dropped if stop <= position)
