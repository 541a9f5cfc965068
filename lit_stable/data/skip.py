"""Drop the data of chosen optimizer steps: from step numbers to ranges of the sample stream.

The remedy for a bad stretch of data is to go back to a checkpoint before it and to leave the stretch out. A request
names optimizer steps, and thereby the data that the run would have consumed at those steps, given what is dropped
already. Whole global batches leave the stream; neither step number nor consumed samples advance over them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from lit_stable.callbacks import step_ranges
from lit_stable.callbacks.positions import Range, stream_position
from lit_stable.callbacks.step_ranges import Steps


def parse_steps(requests: Iterable[str | int]) -> list[Steps]:
    """Read ``"13251-14000"`` or a single step; every malformed request is reported in one ValueError.

    Example::

        >>> parse_steps(["13251-14000", 7])
        [(13251, 14000), (7, 7)]
    """
    steps: list[Steps] = []
    problems: list[str] = []
    for request in requests:
        try:
            steps.append(step_ranges.parse_steps(request))
        except ValueError as error:
            problems.append(f"data.skip_steps={request!r}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return steps


def steps_to_ranges(
    requests: Sequence[Steps], samples_before: Callable[[int], int], dropped: Sequence[Range]
) -> list[Range]:
    """The stretch of the stream that each request drops, half-open, one per request.

    All requests speak of the same run, the one that drops ``dropped`` and nothing else, so their order does not matter
    and overlapping ones count once when they are merged.

    Args:
        requests: First and last optimizer step, both included, counted from 1.
        samples_before: Samples committed before a step; any batch-size schedule is in here.
        dropped: What the run drops already, as half-open ranges of stream positions, sorted and merged.
    """
    ranges: list[Range] = []
    for first, last in requests:
        start, stop = samples_before(first), samples_before(last + 1)
        # Between the two ends the stream may hold older gaps: covering them again changes nothing.
        ranges.append((stream_position(start, dropped), stream_position(stop - 1, dropped) + 1))
    return ranges


def new_ranges(
    requests: Iterable[str | int],
    known: Container[str],
    samples_before: Callable[[int], int],
    consumed: int,
    dropped: Sequence[Range],
) -> dict[str, Range]:
    """What each request that is not ``known`` yet drops; a request is turned into data once in the life of a run.

    Requests are keyed, and known, by their full form FIRST-LAST, so that another spelling is not another request.

    Raises:
        ValueError: when a request is malformed, or new and names a step whose data are among the ``consumed`` samples.
    """
    new = {f"{first}-{last}": (first, last) for first, last in parse_steps(requests)}
    new = {request: steps for request, steps in new.items() if request not in known}
    past = [request for request, (first, _) in new.items() if samples_before(first) < consumed]
    if past:
        raise ValueError(
            f"data.skip_steps={', '.join(past)}: begins at a step that is committed already; "
            "resume from an earlier checkpoint or delete the range."
        )
    return dict(zip(new, steps_to_ranges(list(new.values()), samples_before, dropped), strict=True))
