"""What `lit-stable dump-batch` prints of a step that a run took."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path

from lit_stable.data.store import DocumentPlace
from lit_stable.run.past_step import PastStep, ReadSample


def dump_batch(run: Path, step: int, rank: int | None = None, text: bool = False) -> str:
    """The page that ``dump-batch`` prints.

    Raises:
        ValueError: see ``PastStep``.
    """
    past = PastStep(run, step)
    read = list(past.read(None if rank is None else [rank]))
    rows = [_columns(past), *(_row(past, one) for one in read)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if text:
        tokenizer = past.data.text_tokenizer()
        for number, one in enumerate(read, 1):
            lines[number] += "".join(f"\n    {line}" for line in tokenizer.decode(one.tokens.tolist()).split("\n"))
    return "\n".join([*_header(past, read), *lines])


def _header(past: PastStep, read: list[ReadSample]) -> list[str]:
    beginning, sources = past.beginning, Counter(one.sample.source for one in read)
    ranks = f"{beginning.ranks} data-parallel rank{'s' if beginning.ranks > 1 else ''}"
    first, behind = past.consumed
    lines = [
        f"{past.folder}: step {past.step}, samples {first:,} to {behind - 1:,} of the run, on {ranks};"
        f" {past.recipe_path.name}, begun behind step {beginning.steps}",
        "shown: " + ", ".join(f"{count} of {name}" for name, count in sources.most_common()),
    ]
    if past.length < past.data.sequence_length:
        lines.append(f"rows of {past.length} tokens: the first {past.trained_tokens} of {past.data.sequence_length}")
    return lines


def _columns(past: PastStep) -> list[str]:
    masked = [] if past.data.mask_repeats is None else ["without loss"]
    return ["rank", "micro-batch", "sample", "source", "epoch", "window", *masked, "documents"]


def _row(past: PastStep, one: ReadSample) -> list[str]:
    sample = one.sample
    numbers = [one.rank, one.micro_batch, sample.position, sample.source, sample.epoch, sample.window]
    masked = [] if past.data.mask_repeats is None else [f"{one.masked}/{past.trained_tokens}"]
    return [*map(str, numbers), *masked, _documents(sample.documents)]


def _documents(places: list[DocumentPlace]) -> str:
    """Stretches of neighbours by their source: ``wiki 3-5 (2019-01-07 to 2019-02-01), books 9``."""
    groups = groupby(enumerate(places), key=lambda pair: (pair[1].source, pair[1].number - pair[0]))
    return ", ".join(_stretch([place for _, place in group]) for _, group in groups)


def _stretch(places: list[DocumentPlace]) -> str:
    first, last = places[0].number, places[-1].number
    dates = sorted({place.date for place in places if place.date})
    shown = [f"{date // 10_000}-{date // 100 % 100:02d}-{date % 100:02d}" for date in dates]
    days = f" ({shown[0]}{f' to {shown[-1]}' if len(shown) > 1 else ''})" if shown else ""
    return f"{places[0].source} {first}{f'-{last}' if last > first else ''}{days}"
