"""A folder as `transformers` reads and writes it: config.json, the weights, the tokenizer."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_stable.callbacks.checkpoint_files import partial_path, publish, remove
from lit_stable.callbacks.checkpoint_snapshot import Snapshot
from lit_stable.callbacks.not_written import writing
from lit_stable.data.tokenizer import Tokenizer
from lit_stable.diagnosis.checkpoint_tensors import UNREADABLE

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
_SYSTEMS = re.compile(r"\(os error (\d+)\)")  # the one trace of the system's error in that of safetensors


def write_folder(path: Path, settings: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer | None) -> None:
    """Write a folder, whole or not at all; weights as safetensors, without that package as torch's own file.

    Raises:
        OSError: when it cannot be written; nothing is left of it.
    """
    partial = partial_path(path)
    remove(partial)
    try:
        with writing(path):
            partial.mkdir(parents=True)
            _write_files(partial, settings, tensors, tokenizer)
            publish(path)
    except OSError:
        remove(partial)  # it takes up the room that the disk lacks
        raise


def _write_files(
    folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer | None
) -> None:
    if tokenizer is not None:
        end = tokenizer.decode([tokenizer.eot_id])
        settings = {**settings, "eos_token_id": tokenizer.eot_id}
        tokenizer.save(folder / "tokenizer.json")
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    _write_tensors(folder, tensors)


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        Snapshot(tensors).write(folder / PICKLED)
        return
    try:
        save_file(tensors, folder / SAFE, metadata={"format": "pt"})
    except SafetensorError as error:
        if (told := _SYSTEMS.search(str(error))) is None:
            raise
        number = int(told[1])
        raise OSError(number, os.strerror(number)) from error


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings of a folder's config.json, and its weights, in one file or several.

    Raises:
        ValueError: when there is no config.json, no weights that can be read, or a part of them is missing.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: holds no config.json; give a folder that transformers has saved.")
    settings = _read_json(path / "config.json")
    for name, read in ((SAFE, _read_safe), (PICKLED, _read_pickled)):
        index = path / f"{name}.index.json"
        if index.is_file():
            parts = [path / part for part in _parts(index)]
            return settings, {key: tensor for part in parts for key, tensor in read(part).items()}
        if (path / name).is_file():
            return settings, read(path / name)
    raise ValueError(f"{path}: holds neither {SAFE} nor {PICKLED}, so no weights.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}).") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path}: holds a {type(read).__name__} where transformers writes a mapping.")
    return read


def _parts(index: Path) -> list[str]:
    """The files that an index names, each of which is there."""
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index}: has no weight_map, so it names no files.")
    parts = sorted(set(places.values()))
    if missing := [part for part in parts if not (index.parent / part).is_file()]:
        raise ValueError(f"{index}: names {', '.join(missing)}, not there; copy the whole folder.")
    return parts


def _read_safe(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError(f"{path}: is read by safetensors; pip install 'lit-stable[hf]'.") from error
    try:
        return load_file(path)
    except Exception as error:  # safetensors has an exception of its own, and others for what torch cannot hold
        raise _not_whole(path, error) from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (*UNREADABLE, pickle.UnpicklingError) as error:
        raise _not_whole(path, error) from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{path}: holds no tensors by name; give a folder that transformers has saved.")
    return state


def _not_whole(path: Path, error: Exception) -> ValueError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(f"{path}: cannot be read as weights ({reason}); copy the whole file.")
