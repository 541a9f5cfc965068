"""The mean of the weights of several checkpoints of one model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_stable.model.same_model import model_changes, model_record
from lit_stable.weights.stored_model import StoredModel, open_model, refuse_existing, write_weights

_LEAST = 1e-100  # share; with smaller ones products with weights are rounded to 0, with large ones sums overflow


def average(paths: Sequence[Path], out: Path, shares: Sequence[float] | None = None) -> list[str]:
    """Write a checkpoint of weights alone: sum of share x weight over sum of shares, tensor by tensor.

    Sums are fp64, so that the mean of equal weights is those weights; the result has the dtype of the first. The
    optimizer's state is not averaged and not written.

    Args:
        paths: Two checkpoints or more, files or sharded folders.
        out: The checkpoint to write.
        shares: One number >= 0 for each checkpoint, not all 0; ``None``: all alike.

    Returns:
        Lines for people: what went in, and what came of it.

    Raises:
        ValueError: when the checkpoints are of different models, or an argument is out of range.
    """
    shares = [1.0] * len(paths) if shares is None else list(shares)
    _refuse(paths, shares)
    refuse_existing(out)
    models = [open_model(path) for path in paths]
    for other in models[1:]:
        _refuse_other_model(models[0], other)
    weights = {name: _mean([model.read(name) for model in models], shares) for name in models[0].names()}
    parts = [
        {"checkpoint": str(model.path), "step": model.step, "share": share / sum(shares)}
        for model, share in zip(models, shares, strict=True)
    ]
    kept = {key: models[-1].record[key] for key in ("recipe", "data") if key in models[-1].record}
    write_weights(out, models[0].config, weights, averaged=parts, **kept)
    lines = [f"{part['checkpoint']}: step {part['step']}, share {part['share']:.4g}" for part in parts]
    return [
        *lines,
        f"{out}: {len(weights)} tensors. Optimizer state is not averaged: begin a new run with --ckpt_part weights.",
    ]


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        if share:  # so that a NaN in one that does not count stays out
            total += share * tensor.double()
    return (total / sum(shares)).to(tensors[0].dtype)


def _refuse(paths: Sequence[Path], shares: Sequence[float]) -> None:
    if len(paths) < 2:
        raise ValueError(f"checkpoints={', '.join(map(str, paths))}: a mean takes two or more; name another.")
    if len(shares) != len(paths):
        raise ValueError(f"shares={list(shares)}: there are {len(paths)} checkpoints; give one number for each.")
    if not all(0 <= share < math.inf for share in shares) or not sum(shares) > 0:
        raise ValueError(f"shares={list(shares)}: must be finite numbers of 0 or more, and one of them above 0.")
    if any(share and not _LEAST <= share <= 1 / _LEAST for share in shares):
        raise ValueError(
            f"shares={list(shares)}: those above 0 must lie between {_LEAST:g} and {1 / _LEAST:g}, or sums are"
            " rounded away; give shares of 1."
        )


def _refuse_other_model(first: StoredModel, other: StoredModel) -> None:
    problems, _ = model_changes(first.config, model_record(other.config))
    shapes = {name: tuple(first.read(name).shape) for name in first.names()}
    others = {name: tuple(other.read(name).shape) for name in other.names()}
    if not problems and shapes == others:
        return
    name = next((n for n in [*shapes, *others] if shapes.get(n) != others.get(n)), None)
    differs = (
        problems[0].partition(":")[0].removeprefix("model.")
        if problems
        else f"{name} {shapes.get(name or '')} and {others.get(name or '')}"
    )
    raise ValueError(
        f"{other.path}: is not of the model of {first.path} ({differs}); only weights of one model have a mean."
    )
