"""`lit-stable inspect CKPT [CKPT]`: what a checkpoint's tensors give away, or what changed most between two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_stable.diagnosis.checkpoint_tensors import WEIGHT, CheckpointTensors, open_checkpoint
from lit_stable.diagnosis.tensor_findings import Statistics, statistics, tensor_findings
from lit_stable.run.console import human_count


def run_inspect(argv: Sequence[str]) -> None:
    """Parse the arguments of ``inspect`` and print the page."""
    parser = ArgumentParser(
        prog="lit-stable inspect", description="Look into a Lightning checkpoint, or compare two of one model."
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, help="One or two files or sharded folders.")
    parser.add_argument("--lines", type=int, default=20, help="Tensors to list, the most remarkable first; 0: all.")
    parser.add_argument(
        "--trust", type=bool, default=False, help="Load objects that may run code; only your own files."
    )
    arguments = parser.parse_args(list(argv))
    opened = [open_checkpoint(path, arguments.trust) for path in arguments.checkpoints]
    if len(opened) > 2:
        raise ValueError(f"{len(opened)} checkpoints: one is inspected or two are compared; give one or two.")
    print(inspect(opened[0], arguments.lines) if len(opened) == 1 else compare(opened[0], opened[1], arguments.lines))


def inspect(checkpoint: CheckpointTensors, lines: int = 20) -> str:
    """The page about one checkpoint: sizes, findings, tensors by RMS."""
    measured = [statistics(entry) for entry in checkpoint.entries if entry.role == WEIGHT]
    page = [_header(checkpoint, measured)]
    found = tensor_findings(checkpoint, measured)
    page += [f"  ! {line}" for line in found] or ["  nothing wrong found"]
    by_size = sorted(measured, key=lambda m: (m.not_finite, m.rms), reverse=True)
    shown = by_size[: lines or None]
    width = max((len(m.name) for m in shown), default=0)
    page.append(f"{'tensor':<{width}}  {'RMS':>10}  {'largest':>10}  dtype     shape")
    for m in shown:
        shape = " x ".join(map(str, m.shape)) or "one number"
        page.append(f"{m.name:<{width}}  {m.rms:>10.4g}  {m.largest:>10.4g}  {m.dtype:<8}  {shape}")
    if len(shown) < len(by_size):
        page.append(f"{len(by_size) - len(shown)} more; --lines 0 lists all")
    return "\n".join(page)


def _header(checkpoint: CheckpointTensors, measured: list[Statistics]) -> str:
    sizes: Counter[str] = Counter()
    for m in measured:
        count = 1
        for side in m.shape:
            count *= side
        sizes[m.dtype] += count
    weights = ", ".join(f"{human_count(count)} {dtype}" for dtype, count in sizes.most_common())
    kinds: Counter[str] = Counter(entry.role for entry in checkpoint.entries if entry.role != WEIGHT)
    state = ", ".join(f"{count} x {role}" for role, count in kinds.items()) or "none"
    step = "" if checkpoint.global_step is None else f"step {checkpoint.global_step}; "
    return f"{checkpoint.path}: {step}weights: {weights}; optimizer state: {state}"


def compare(old: CheckpointTensors, new: CheckpointTensors, lines: int = 20) -> str:
    """The page about two checkpoints: relative change ``|new - old| / |old|`` of each tensor, the largest first."""
    before = {entry.name: entry for entry in old.entries if entry.role == WEIGHT}
    after = {entry.name: entry for entry in new.entries if entry.role == WEIGHT}
    page = [f"{old.path} (step {old.global_step}) -> {new.path} (step {new.global_step})"]
    changes = []
    for name in [name for name in before if name in after]:
        a, b = before[name].read().double(), after[name].read().double()
        if a.shape != b.shape:
            page.append(f"  ! {name}: shape {tuple(a.shape)} -> {tuple(b.shape)}")
            continue
        norm = float(a.norm())
        changes.append((float((b - a).norm()) / norm if norm else float(b.norm()), name))
    page += [f"  ! {name}: only in the first" for name in before if name not in after]
    page += [f"  ! {name}: only in the second" for name in after if name not in before]
    still = sum(change == 0 for change, _ in changes)
    page.append(f"{len(changes)} tensors in both, {still} of them unchanged; relative change, the largest first:")
    changes.sort(key=lambda pair: (pair[0] == pair[0], -pair[0]))  # not a number: first
    page += [f"  {change:>10.4g}  {name}" for change, name in changes[: lines or None]]
    return "\n".join(page)
