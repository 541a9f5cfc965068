"""What `lit-stable inspect` prints of one checkpoint, or of two."""

from __future__ import annotations

from collections import Counter

from lit_stable.diagnosis.checkpoint_tensors import WEIGHT, CheckpointTensors
from lit_stable.diagnosis.tensor_findings import Statistics, statistics, tensor_findings
from lit_stable.run.console import human_count


def inspect(checkpoint: CheckpointTensors, lines: int = 20) -> str:
    """The page about one checkpoint: sizes, findings, tensors by RMS."""
    measured = [statistics(entry) for entry in checkpoint.entries if entry.role == WEIGHT]
    page = [_header(checkpoint, measured)]
    found = [*_damage(checkpoint), *tensor_findings(checkpoint, measured)]
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


def _damage(checkpoint: CheckpointTensors) -> list[str]:
    """First of all findings: what is read from it is not what was saved."""
    return [f"{checkpoint.damage}; use another checkpoint"] if checkpoint.damage else []


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
    page += [f"  ! {line}" for checkpoint in (old, new) for line in _damage(checkpoint)]
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
