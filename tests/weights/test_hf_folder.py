"""Folders of `transformers`: weights in one file or several, and what is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from lit_stable.weights.hf_folder import read_folder, write_folder

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4), "b.bias": torch.zeros(4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hf", {"model_type": "gpt2"}, TENSORS, None)
    return tmp_path / "hf"


def in_parts(folder: Path, kind: str) -> Path:
    """Put the weights into two files with an index, as `transformers` does with large models."""
    from safetensors.torch import save_file

    (folder / "model.safetensors").unlink()
    places = {}
    for number, names in enumerate((["a.weight", "b.bias"], ["b.weight"]), 1):
        part, tensors = kind.replace(".", f"-{number:05}-of-00002.", 1), {name: TENSORS[name] for name in names}
        save_file(tensors, folder / part) if kind.endswith("safetensors") else torch.save(tensors, folder / part)
        places |= dict.fromkeys(names, part)
    index = folder / f"{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def assert_whole(folder: Path) -> None:
    settings, tensors = read_folder(folder)
    assert settings["model_type"] == "gpt2"
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_several_files_are_those_of_one(folder: Path, kind: str) -> None:
    assert_whole(folder)
    in_parts(folder, kind)
    assert_whole(folder)


def test_a_part_that_is_not_there_is_named(folder: Path) -> None:
    index = in_parts(folder, "model.safetensors")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json: names model-00002-of-00002\.safetensors, not there; copy the"):
        read_folder(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: has no weight_map, so it names no files"):
        read_folder(folder)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: is no JSON"):
        read_folder(folder)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("left", [0, 40, 100])
def test_weights_that_were_cut_off_are_named(folder: Path, kind: str, left: int) -> None:
    content = (folder / "model.safetensors").read_bytes()
    if kind == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(TENSORS, folder / kind)
        content = (folder / kind).read_bytes()
    (folder / kind).write_bytes(content[:left])
    with pytest.raises(ValueError, match=rf"{kind}: cannot be read as weights \(.+\); copy the whole file\.$"):
        read_folder(folder)


def test_what_is_no_such_folder_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(
            ValueError, match=r"model\.safetensors: is read by safetensors; pip install 'lit-stable\[hf\]'"
        ):
            read_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"hf: holds neither model\.safetensors nor pytorch_model\.bin, so no weights"):
        read_folder(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: holds a list where transformers writes a mapping"):
        read_folder(folder)
    (folder / "config.json").write_text("{'a'")
    with pytest.raises(ValueError, match=r"config\.json: is no JSON"):
        read_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"hf: holds no config\.json; give a folder that transformers has saved"):
        read_folder(folder)
