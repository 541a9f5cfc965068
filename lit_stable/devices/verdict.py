"""Which device is bad, from what each of them came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from lit_stable.devices.links import LinkTest

#: Below this share of the median of all devices one counts as slow.
SLOW = 0.7
CPU = "CPU"


@dataclass
class Found:
    """What was found on one device."""

    name: str
    """``rank 3 (node-7, cuda:3)``."""
    kind: str
    """Model of the device: only those alike are compared with each other."""
    hash: int
    tflops: float
    problems: list[str] = field(default_factory=list)
    links: LinkTest | None = None


def verdict(found: list[Found]) -> list[str]:
    """A sentence for each thing that is wrong, with the name of the device, in the order of devices; none: all is well.

    Args:
        found: One per device, in the order of ranks.
    """
    wrong = [(device, [*device.problems, *_against_its_like(device, found)]) for device in found]
    for index, problems in _links(found):
        wrong[index][1].append(problems)
    return [f"{device.name}: {problem}" for device, problems in wrong for problem in problems]


def _links(found: list[Found]) -> Iterator[tuple[int, str]]:
    """(place of a device, what its links did). Who sends wrong makes every sum wrong, so the others' are not told."""
    tested = [device.links for device in found if device.links is not None]
    senders = Counter(sender for links in tested for sender in links.bad_senders)
    named = {sender for sender, accusers in senders.items() if 2 * accusers > len(found)}
    yield from ((sender, f"what it sends came wrong on {senders[sender]} of {len(found)} ranks") for sender in named)
    for index, links in enumerate(tested):
        before = (index - 1) % len(found)
        if links.wrong_from_before and before not in named:
            yield index, f"what {found[before].name} sends came wrong here"
        if links.wrong_sums and not named:
            yield index, f"{links.wrong_sums} sums over all ranks came out wrong"


def _against_its_like(device: Found, found: list[Found]) -> list[str]:
    problems, alike = [], [other for other in found if other.kind == device.kind]
    (usual, times), *_ = Counter(other.hash for other in alike).most_common(1)
    if device.hash != usual and 2 * times > len(alike):
        problems.append(f"its products have other bits than those of {times} devices like it")
    if device.kind == CPU:  # shared with whoever else is there: its speed says nothing
        return problems
    links = [other.links.next_gbs for other in alike if other.links is not None]
    for what, unit, value, values in (
        ("its products", "TFLOP/s", device.tflops, [other.tflops for other in alike]),
        ("its link to the next rank", "GB/s", device.links.next_gbs if device.links else None, links),
    ):
        if value is not None and len(values) > 1 and value < SLOW * median(values):
            problems.append(f"{what}: {value:.3g} {unit}, where the median of devices like it is {median(values):.3g}")
    return problems


def page(found: list[Found], wrong: list[str]) -> str:
    """A table of all devices, and the verdict."""
    rows = [["device", "model", "TFLOP/s", "all-reduce GB/s", "to the next GB/s"]]
    rows += [[one.name, one.kind, f"{one.tflops:.3g}", *(_speeds(one.links) if one.links else "--")] for one in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [""] + (
        [f"bad: {sentence}" for sentence in wrong] or [f"{len(found)} device{'s' if len(found) > 1 else ''}, all well"]
    )
    return "\n".join(lines)


def _speeds(links: LinkTest) -> list[str]:
    return [f"{links.all_reduce_gbs:.3g}", f"{links.next_gbs:.3g}"]
