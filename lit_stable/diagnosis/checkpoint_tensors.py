"""The tensors of any Lightning checkpoint, one file or sharded folder, read one at a time."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lit_stable.callbacks.checkpoint_files import damage
from lit_stable.callbacks.safe_checkpoints import KEY

WEIGHT = "weight"  # the role of what is no optimizer state
_GROUP = re.compile(r"optimizer_(\d+)\.param_groups\.(\d+)\.weight_decay")  # in a sharded checkpoint
#: What torch raises about bytes that are no longer what was saved.
UNREADABLE = (RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, not read yet."""

    name: str
    """Of the parameter or buffer; ``optimizer 0, parameter 12`` where a checkpoint does not name it."""
    role: str
    """``weight``, or the kind of optimizer state: ``exp_avg``, ``exp_avg_sq``, ``step``, ..."""
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class CheckpointTensors:
    """What a checkpoint holds."""

    path: Path
    entries: list[Entry]
    global_step: int | None
    eps: list[float]
    """Of the optimizers' groups, where they have one."""
    undecayed: frozenset[str] = frozenset()
    """Parameters that are known to stand in a group without weight decay."""
    damage: str | None = None
    """Which part of it does not match its checksum."""

    def weights(self) -> Iterator[Entry]:
        """Parameters and buffers."""
        return (entry for entry in self.entries if entry.role == WEIGHT)

    def states(self, role: str) -> dict[str, Entry]:
        """One kind of optimizer state, by the parameter's name."""
        return {entry.name: entry for entry in self.entries if entry.role == role}


def open_checkpoint(path: Path, trust: bool = False) -> CheckpointTensors:
    """Open a checkpoint of any Lightning project, or a plain state dict.

    Args:
        path: File, or folder of a sharded one.
        trust: Load pickled objects other than tensors and plain values, which runs code that the file names.

    Raises:
        ValueError: when it is not there, is no checkpoint, or holds objects and is not trusted.
    """
    if not path.exists():
        raise ValueError(f"{path}: does not exist; give a .ckpt file or the folder of a sharded checkpoint.")
    if path.is_dir():
        if not (path / ".metadata").exists():
            raise ValueError(f"{path}: is a folder without `.metadata`, so no sharded checkpoint; give one inside it.")
        try:
            return replace(_open_folder(path, trust), damage=damage(path))
        except (*UNREADABLE, pickle.UnpicklingError) as error:
            raise ValueError(f"{path}: cannot be read as a checkpoint ({damage(path) or error}).") from error
    content = _load(path, trust)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a checkpoint's dict.")
    # In the format before torch 1.6 a file has no checksums.
    return replace(_open_content(path, content), damage=damage(path) if zipfile.is_zipfile(path) else None)


def _load(path: Path, trust: bool) -> Any:
    try:
        # Mapped, so that one tensor at a time is in memory; files in the format before torch 1.6 cannot be.
        return torch.load(path, map_location="cpu", weights_only=not trust, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if zipfile.is_zipfile(path) and (phrase := damage(path)):
            raise ValueError(f"{path}: cannot be read as a checkpoint ({phrase}).") from error
        first = next((line for line in str(error).splitlines() if "GLOBAL" in line), "objects other than tensors")
        raise ValueError(
            f"{path}: is not loaded, since it needs more than tensors and plain values ({first.strip()}); if you trust"
            " whoever wrote it, add --trust true."
        ) from error
    except (*UNREADABLE, AssertionError) as error:
        raise ValueError(f"{path}: cannot be read as a checkpoint ({_reason(path, error)}).") from error


def _reason(path: Path, error: Exception) -> str:
    if path.is_file() and not path.stat().st_size:
        return "it is empty"
    # Torch goes on at length, or says nothing.
    return next(iter(str(error).splitlines()), "").split(". ")[0].rstrip(".") or type(error).__name__


def _open_content(path: Path, content: dict[str, Any]) -> CheckpointTensors:
    weights = content.get("state_dict", content if "optimizer_states" not in content else {})
    optimizers = content.get("optimizer_states", [])
    if not isinstance(weights, dict) or not all(isinstance(optimizer, dict) for optimizer in optimizers):
        raise ValueError(f"{path}: holds no mappings under state_dict and optimizer_states; give what a Trainer saved.")
    entries = [Entry(name, WEIGHT, partial(_same, t)) for name, t in weights.items() if isinstance(t, Tensor)]
    eps, decays = [], dict[tuple[int, int], Any]()
    for index, optimizer in enumerate(optimizers):
        groups = optimizer.get("param_groups", [])
        eps += [group["eps"] for group in groups if "eps" in group]
        decays |= {(index, number): group.get("weight_decay") for number, group in enumerate(groups)}
        for parameter, state in optimizer.get("state", {}).items():
            name = parameter if isinstance(parameter, str) else f"optimizer {index}, parameter {parameter}"
            entries += [
                Entry(name, role, partial(_same, torch.as_tensor(value)))
                for role, value in state.items()
                if isinstance(value, (Tensor, int, float))
            ]
    if not entries:
        raise ValueError(f"{path}: holds no tensors under state_dict or optimizer_states.")
    step = content.get("global_step")
    return CheckpointTensors(path, entries, step if isinstance(step, int) else None, eps, _undecayed(content, decays))


def _undecayed(checkpoint: Any, decays: dict[tuple[int, int], Any]) -> frozenset[str]:
    """By decay of (optimizer, group), and the names that `SafeCheckpoints` saves of each; a foreign one has none."""
    own = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    saved = own.get("parameters", []) if isinstance(own, dict) else []
    groups = {(i, j): names for i, optimizer in enumerate(saved) for j, names in enumerate(optimizer or [])}
    return frozenset(name for place, decay in decays.items() if decay == 0 for name in groups.get(place, []))


def _read(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process.*")
        load(state, checkpoint_id=str(path), no_dist=True)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _open_folder(path: Path, trust: bool) -> CheckpointTensors:
    stored = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    entries, options = [], []
    for key, kind in stored.items():
        if not isinstance(kind, TensorStorageMetadata):
            if key.endswith(".eps") or _GROUP.fullmatch(key):
                options.append(key)
            continue
        place, _, rest = key.partition(".")
        read = partial(_read_piecewise, path, key, kind)
        if place == "state_dict":
            entries.append(Entry(rest, WEIGHT, read))
        elif rest.startswith("state."):
            name, _, role = rest.removeprefix("state.").rpartition(".")
            entries.append(Entry(name, role, read))
    values: dict[str, Any] = dict.fromkeys(options)
    if values:
        _read(path, values)
    eps = [float(value) for key, value in values.items() if key.endswith(".eps")]
    places = {_GROUP.fullmatch(key): value for key, value in values.items()}
    decays = {(int(match[1]), int(match[2])): value for match, value in places.items() if match}
    meta = path / "meta.pt"
    rest = _load(meta, trust) if meta.exists() else {}
    return CheckpointTensors(path, entries, rest.get("global_step"), eps, _undecayed(rest, decays))


def _read_piecewise(path: Path, key: str, kind: TensorStorageMetadata) -> Tensor:
    state: dict[str, Any] = {key: torch.empty(kind.size, dtype=kind.properties.dtype)}
    _read(path, state)
    tensor: Tensor = state[key]
    return tensor
