"""What the numbers in a checkpoint give away: not finite, gains that never moved, moments that vanished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_stable.diagnosis.checkpoint_tensors import CheckpointTensors, Entry

_NORM_PARTS = ("norm", "ln_", "ln.", "layernorm")


@dataclass(frozen=True)
class Statistics:
    """Of one tensor, over its finite values, in fp64."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rms: float
    largest: float
    not_finite: int


def statistics(entry: Entry) -> Statistics:
    """Read one tensor and measure it."""
    tensor = entry.read()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_floating_point():
        tensor = tensor.double()  # formats of 8 bits can do no more than this
    finite = torch.isfinite(tensor) if tensor.is_floating_point() else torch.ones_like(tensor, dtype=torch.bool)
    values = tensor[finite].double() if tensor.numel() else tensor.double()
    rms = float(values.square().mean().sqrt()) if values.numel() else 0.0
    largest = float(values.abs().max()) if values.numel() else 0.0
    return Statistics(entry.name, tuple(tensor.shape), dtype, rms, largest, int((~finite).sum()))


def tensor_findings(checkpoint: CheckpointTensors, measured: list[Statistics]) -> list[str]:
    """One sentence for each thing that is wrong or worth a look."""
    lines = [f"{m.name}: {m.not_finite} of its values are not finite" for m in measured if m.not_finite]
    return [*lines, *_gains(checkpoint), *_moments(checkpoint), *_steps(checkpoint)]


def _gains(checkpoint: CheckpointTensors) -> Iterator[str]:
    gains = [(entry.name, entry.read()) for entry in checkpoint.weights() if _is_gain(entry)]
    steps = checkpoint.global_step or 0
    still = [name for name, gain in gains if bool((gain == 1).all())]
    if still and steps:
        yield (
            f"{len(still)} of {len(gains)} norm gains are exactly 1.0 after {steps} steps ({_some(still)}): they never"
            " moved. Weights kept in bf16 round small updates away; keep norms in fp32, or they are frozen"
        )
    for name, gain in gains:
        mean, spread = float(gain.double().mean()), float(gain.double().std(correction=0))
        if name not in checkpoint.undecayed and steps and 0 < mean < 0.98 and spread < 0.25 * (1 - mean):
            yield (
                f"{name}: its gains shrank alike, to {mean:.4g} with a spread of {spread:.2g}, as weight decay alone"
                f" would make them (1 - lr x decay = {mean ** (1 / steps):.8g} a step); leave norms out of decay"
            )


def _is_gain(entry: Entry) -> bool:
    name = entry.name.lower()
    return name.endswith("weight") and any(part in name for part in _NORM_PARTS) and entry.read().ndim == 1


def _moments(checkpoint: CheckpointTensors) -> Iterator[str]:
    first, eps = checkpoint.states("exp_avg"), min(checkpoint.eps, default=None)
    lost, total, below = Counter[str](), 0, 0
    for name, entry in checkpoint.states("exp_avg_sq").items():
        second = entry.read()
        if bad := int((~torch.isfinite(second)).sum()):
            yield f"{name}: {bad} of its second moments are not finite"
        total += second.numel()
        if name in first:
            mean = first[name].read()
            if not bool(torch.isfinite(mean).all()):
                yield f"{name}: {int((~torch.isfinite(mean)).sum())} of its first moments are not finite"
            lost[name] += _vanished(mean, second)
        if eps is not None:
            below += int((second.double().sqrt() < eps).sum())
    if count := sum(lost.values()):
        worst = [name for name, n in lost.most_common() if n]
        yield (
            f"{count} second moments are 0 where the first is not ({_some(worst)}): they underflowed, and these weights"
            " move by lr x m / eps"
        )
    if eps is not None and total and below > 0.01 * total:
        yield (
            f"{below / total:.0%} of second moments have a root below eps={eps:g}: there the gradient is divided by eps"
            " and not by its own size"
        )


def _vanished(first: Tensor, second: Tensor) -> int:
    return int(((second == 0) & (first != 0)).sum()) if first.shape == second.shape else 0


def _steps(checkpoint: CheckpointTensors) -> Iterator[str]:
    counts = {name: int(entry.read()) for name, entry in checkpoint.states("step").items()}
    kinds = Counter(counts.values())
    if len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        odd = [name for name, count in counts.items() if count != usual]
        yield f"step counts differ: {usual} for most, another for {len(odd)} tensors ({_some(odd)})"
    elif kinds and checkpoint.global_step is not None and next(iter(kinds)) != checkpoint.global_step:
        yield (
            f"the optimizer counts {next(iter(kinds))} steps and the checkpoint {checkpoint.global_step}: steps were"
            " skipped, or the optimizer was reset"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
