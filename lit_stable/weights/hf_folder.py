"""A folder as `transformers` reads and writes it: config.json, the weights, the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_stable.callbacks.checkpoint_files import partial_path, publish, remove
from lit_stable.data.tokenizer import Tokenizer

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def write_folder(path: Path, settings: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer | None) -> None:
    """Write a folder, whole or not at all; weights as safetensors, without that package as torch's own file."""
    partial = partial_path(path)
    remove(partial)
    partial.mkdir(parents=True)
    if tokenizer is not None:
        end = tokenizer.decode([tokenizer.eot_id])
        settings = {**settings, "eos_token_id": tokenizer.eot_id}
        tokenizer.save(partial / "tokenizer.json")
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        (partial / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
    (partial / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    _write_tensors(partial, tensors)
    publish(path)


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        torch.save(tensors, folder / PICKLED)
        return
    save_file(tensors, folder / SAFE, metadata={"format": "pt"})


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings of a folder's config.json, and its weights, in one file or several.

    Raises:
        ValueError: when there is no config.json, or no weights that can be read.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: holds no config.json; give a folder that transformers has saved.")
    try:
        settings = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: is no JSON ({error}).") from error
    for name, read in ((SAFE, _read_safe), (PICKLED, _read_pickled)):
        index = path / f"{name}.index.json"
        if index.is_file():
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return settings, {key: tensor for part in parts for key, tensor in read(path / part).items()}
        if (path / name).is_file():
            return settings, read(path / name)
    raise ValueError(f"{path}: holds neither {SAFE} nor {PICKLED}, so no weights.")


def _read_safe(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError(f"{path}: is read by safetensors; pip install 'lit-stable[hf]'.") from error
    return load_file(path)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state
