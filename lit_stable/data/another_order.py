"""What a resume is told whose recipe, or data, puts other samples into the places that the run has counted."""

from __future__ import annotations

from collections.abc import Sequence

from lit_stable.callbacks.positions import Range, consumed_before, stream_position

_ORDERS = (
    *("data.seed_data", "data.sequence_length", "data.sources", "data.weight_schedule"),
    *("data.order.by", "data.order.shard", "data.order.buffer"),
)


def another_order(differences: Sequence[str], consumed: int, dropped: Sequence[Range]) -> str | None:
    """What becomes of the data of a run that goes on in another order of samples; ``None``: the order is the same.

    Args:
        differences: Lines ``key: old -> new`` between the recipe and data of the checkpoint and those of today.
        consumed: Samples committed at the checkpoint.
        dropped: Ranges of stream positions that are left out, sorted and merged.

    Raises:
        ValueError: when ranges lie ahead that were dropped for what stood there.
    """
    lines = [line for line in differences if line.startswith(_ORDERS)]
    if not lines:
        return None
    here = stream_position(consumed, dropped)
    if ahead := [(start, stop) for start, stop in dropped if stop > here]:
        start, stop = ahead[-1]
        raise ValueError(
            f"{'; '.join(lines)}: puts other samples at stream positions {start} to {stop - 1}, which are left out for"
            f" what stood there; keep what it was up to a checkpoint behind them, of {consumed_before(start, dropped)}"
            " samples or more."
        )
    keys = ", ".join(line.partition(": ")[0] for line in lines)
    return (
        f"another order of samples from here on ({keys}): of an epoch that is under way some windows come twice, some"
        f" not at all{', and some that were left out' if dropped else ''}; data.order.reshuffle shuffles what is left"
    )
