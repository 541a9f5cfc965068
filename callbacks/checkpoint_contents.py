"""What a checkpoint holds, as against what is to be filled from it: one that does not fit is refused in a sentence."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .base import MisconfigurationException
from .not_written import not_written

Shapes = dict[str, tuple[int, ...]]
_WEIGHTS = "state_dict"  # Lightning's key for a module's weights, in a file and in front of the names in a folder
_VERSION = "pytorch-lightning_version"


class CheckpointError(MisconfigurationException):
    """A checkpoint that cannot be written, read or gone on with; the text names it and says what to do instead."""


def refuse_foreign(path: Path, checkpoint: Any, needs_optimizer: bool) -> None:
    """Raise when a file holds something else than Lightning writes, or too little to go on training from."""
    keys = list(checkpoint) if isinstance(checkpoint, Mapping) else None
    if keys is None or _WEIGHTS not in keys or _VERSION not in keys:
        held = type(checkpoint).__name__ if keys is None else f"dict of {', '.join(map(str, keys[:3])) or 'nothing'}"
        raise CheckpointError(
            f"{path}: is no Lightning checkpoint but a {held}{' ...' if len(keys or ()) > 3 else ''}; give one that a"
            " Trainer has saved."
        )
    if needs_optimizer and "optimizer_states" not in keys:
        raise CheckpointError(
            f"{path}: holds weights and no optimizer state, as with ModelCheckpoint(save_weights_only=True); to go on"
            " training give a whole checkpoint (lit-stable: a new run begins with the weights by --ckpt_part weights)."
        )


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """Shapes of the tensors in a state dict; of a sharded one the whole tensor's."""
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def stored_shapes(path: Path, weights_only: bool, needs_optimizer: bool) -> Shapes:
    """Shapes of the weights in a checkpoint, file or folder, without reading them.

    Args:
        path: The checkpoint.
        weights_only: Whether torch may load no more than plain data from a file.
        needs_optimizer: See :func:`refuse_foreign`.

    Raises:
        CheckpointError: when a file is no Lightning checkpoint.
    """
    if path.is_dir():
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # costs half a second to import

        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        weights = {k.removeprefix(f"{_WEIGHTS}."): v for k, v in entries.items() if k.startswith(f"{_WEIGHTS}.")}
        return {name: tuple(entry.size) for name, entry in weights.items() if hasattr(entry, "size")}
    checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    refuse_foreign(path, checkpoint, needs_optimizer)
    return shapes_of(checkpoint[_WEIGHTS])


def refuse_other_model(path: Path, stored: Shapes, module: nn.Module, strict: bool) -> None:
    """Raise when the weights in a checkpoint are not those that a module takes.

    Args:
        path: The checkpoint.
        stored: What it holds.
        module: What is to be filled.
        strict: Whether each side must have all that the other has.
    """
    own = shapes_of(module.state_dict())
    found = [
        f"{name} has shape {stored[name]} in it and {own[name]} in the model"
        for name in own
        if name in stored and stored[name] != own[name]
    ]
    if strict:
        found += [f"the model has {name} {shape}, which it lacks" for name, shape in own.items() if name not in stored]
        found += [f"it has {name} {shape}, which the model lacks" for name, shape in stored.items() if name not in own]
    if found:
        more = f" (and {len(found) - 1} more differences)" if len(found) > 1 else ""
        raise CheckpointError(
            f"{path}: is of another model: {found[0]}{more}; go on with the model that wrote it, or start a new run."
        )


@contextmanager
def told_as_a_sentence(path: Path) -> Iterator[None]:
    """Turn what torch raises about a file that it will not or cannot read into a sentence."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than plain data, which torch does not load unasked ({_named_global(error)}); if you"
            " trust the file, give weights_only=False to fit, or save it anew without those objects."
        ) from error
    except BaseException as error:
        if (failures := _of_all_ranks(error)) is None:
            raise
        raise CheckpointError(
            f"{path}: cannot be loaded into this model and optimizer ({_one_line(failures[0])}); go on with those that"
            " wrote it."
        ) from error


@contextmanager
def or_not_written(path: Path) -> Iterator[None]:
    """Turn a write that failed, on a full disk most of all, into a sentence."""
    try:
        yield
    except BaseException as error:
        failed = next((e for e in _of_all_ranks(error) or [error] if isinstance(e, OSError)), None)
        if failed is None:
            raise
        raise CheckpointError(not_written(path, failed)) from error


def _of_all_ranks(error: BaseException) -> list[BaseException] | None:
    """What went wrong on each rank in a distributed save or load, which raises what is no ``Exception``."""
    # By its name: to import the class costs half a second, and one that was raised was imported.
    if type(error).__name__ != "CheckpointException":
        return None
    failures: dict[int, tuple[BaseException, Any]] = error.failures  # type: ignore[attr-defined]
    return [failure for failure, _ in failures.values()]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _named_global(error: pickle.UnpicklingError) -> str:
    named = _one_line(error).partition("GLOBAL ")[2].split()
    return named[0] if named else _one_line(error)[:120]
