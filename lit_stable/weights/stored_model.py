"""The model in a checkpoint: its options and its weights, apart from the run that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.checkpoint_files import damage, partial_path, publish
from lit_stable.callbacks.checkpoint_snapshot import Snapshot
from lit_stable.callbacks.newest_checkpoint import whole_one_instead
from lit_stable.callbacks.not_written import writing
from lit_stable.callbacks.safe_checkpoints import FORMAT, KEY
from lit_stable.callbacks.whole_file import file_in_the_way
from lit_stable.diagnosis.checkpoint_tensors import CheckpointTensors, open_checkpoint
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.same_model import model_record

PREFIX = "gpt."  # in front of the model's names in a GPTModule


@dataclass(frozen=True)
class StoredModel:
    """A model as it lies in a checkpoint; weights are read one at a time."""

    path: Path
    config: GPTConfig
    record: dict[str, Any]
    """What the checkpoint says of its run: recipe, data, schedule; some of it may be missing."""
    tensors: CheckpointTensors

    @property
    def step(self) -> int:
        """Optimizer steps behind it."""
        return self.tensors.global_step or 0

    def names(self) -> list[str]:
        """The names of its weights in a ``GPT``; a tied head is the embedding and has none of its own."""
        found = [entry.name.removeprefix(PREFIX) for entry in self.tensors.weights() if entry.name.startswith(PREFIX)]
        return [name for name in found if not (self.config.tied and name == "head.weight")]

    def read(self, name: str) -> Tensor:
        """One weight, whole, on the CPU."""
        entry = next(entry for entry in self.tensors.weights() if entry.name == PREFIX + name)
        return entry.read()

    def weights(self) -> dict[str, Tensor]:
        """All weights by name."""
        return {name: self.read(name) for name in self.names()}


def open_model(path: Path) -> StoredModel:
    """Open a checkpoint of this project, one file or a sharded folder.

    Raises:
        CheckpointError: when it is damaged.
        ValueError: when it cannot be read, or does not hold the options of a model.
    """
    if path.exists() and (phrase := damage(path)):
        raise CheckpointError(f"{phrase}; {whole_one_instead(path, 'give')}.")
    tensors = open_checkpoint(path)
    record = read_record(path)
    if "model" not in record:
        raise ValueError(
            f"{path}: does not hold its model's options, so it is of another project or of an older version; go on"
            " with it for a step, and give what that saves."
        )
    known = GPTConfig.__dataclass_fields__
    if unknown := [name for name in record["model"] if name not in known]:
        raise ValueError(f"{path}: its model has the option {unknown[0]}, unknown here; upgrade lit-stable.")
    return StoredModel(path, GPTConfig(**record["model"]), record, tensors)


def read_record(path: Path) -> dict[str, Any]:
    """What this project wrote into a readable checkpoint beside Lightning's own; empty where it wrote nothing."""
    where = path / "meta.pt" if path.is_dir() else path
    content = torch.load(where, map_location="cpu", weights_only=True, mmap=True) if where.exists() else {}
    record: dict[str, Any] = content.get(KEY, {})
    return record


def build_model(stored: StoredModel, device: torch.device | str = "cpu") -> GPT:
    """The model, in evaluation mode, filled.

    Raises:
        ValueError: when the checkpoint lacks a weight, or has one too many or of another shape.
    """
    with torch.device("meta"):
        gpt = GPT(stored.config)
    gpt.to_empty(device=device)
    gpt.tie()
    found, own = stored.weights(), dict(gpt.named_parameters())
    wrong = sorted(found.keys() ^ own.keys()) or [name for name, t in found.items() if t.shape != own[name].shape]
    if wrong:
        raise ValueError(f"{stored.path}: its weight {wrong[0]} does not belong to its model's options.")
    for name, parameter in own.items():
        parameter.data.copy_(found[name])
    return gpt.eval()


def write_weights(path: Path, config: GPTConfig, weights: dict[str, Tensor], **record: Any) -> None:
    """Write a checkpoint file of weights alone: for ``validate``, ``--ckpt_part weights``, ``export``, ``generate``.

    Args:
        path: Where; must not exist.
        config: The model.
        weights: By name in a ``GPT``; without the head's where it is tied.
        record: What else to say under this project's key.

    Raises:
        ValueError: when something lies at ``path`` already.
        OSError: when it cannot be written; nothing is left of it.
    """
    refuse_existing(path)
    state = {PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}
    if config.tied:
        state[f"{PREFIX}head.weight"] = state[f"{PREFIX}wte.weight"]
    content = {
        "state_dict": state,
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        KEY: {"format": FORMAT, "model": model_record(config), **record},
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Snapshot(content).write(partial_path(path))  # which leaves nothing of a file that it could not finish
        publish(path)


def refuse_existing(path: Path) -> None:
    """Raise where something would be written over, or below a file."""
    if path.exists():
        raise ValueError(f"out={path}: exists already, and nothing is written over; name another.")
    if (file := file_in_the_way(path)) is not None:
        raise ValueError(f"out={path}: cannot be written, since {file} is a file; name another.")
