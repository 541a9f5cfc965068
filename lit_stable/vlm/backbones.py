"""The backbones' trained weights: which checkpoint a recipe means, and what is taken from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from torch import Tensor

from lit_stable.data.corpus import BUILTIN_PREFIX
from lit_stable.data.tokenizer import is_trained, make_tokenizer
from lit_stable.diagnosis.checkpoint_tensors import open_checkpoint
from lit_stable.run.folder import checkpoints, find_checkpoint, newest_run_with_checkpoint
from lit_stable.run.past_step import rebuilt_data
from lit_stable.vlm.options import VisionOptions
from lit_stable.weights.stored_model import read_record

VISION = "sight.vision."  # in front of its names in a VLMModule
SIGHT = "sight"  # in a checkpoint's record: the options of new blocks and vision backbone
HF = "hf"  # in that record: the settings of a vision model of transformers
_OF_A_RUN = {"run", "hf"}  # options of a vision backbone that say where it comes from


def find_backbone(given: str, root: Path, key: str) -> Path:
    """The checkpoint that a recipe means.

    Args:
        given: A run by its name (the newest that has a checkpoint), a run folder, RUN@STEP, or a checkpoint.
        root: Folder of all runs.
        key: Of the recipe.

    Raises:
        ValueError: when there is none; the sentence says how one is made.
    """
    if (run := newest_run_with_checkpoint(root, given)) is not None:
        return checkpoints(run)[-1]
    try:
        return find_checkpoint(given, root, "")
    except ValueError as error:
        reason = str(error).partition(": ")[2].split(";")[0].rstrip(".")
        raise ValueError(
            f"{key}={given}: neither a checkpoint nor a run under {root} that has one ({reason}); train it first, as by"
            f" `lit-stable fit --config hf_vlm/{Path(given).name}`, or name another."
        ) from error


def vision_weights(path: Path, options: VisionOptions) -> dict[str, Tensor]:
    """The weights of a vision backbone in a checkpoint, by their names in it.

    Raises:
        ValueError: when the checkpoint has none, or one that is built otherwise.
    """
    stored = read_record(path).get(SIGHT, {}).get("vision")
    if stored is None:
        raise ValueError(f"model.vision.run={options.run}: {path} holds no vision backbone; name a run of one.")
    wanted = vars(options)
    for name, value in stored.items():
        if name not in _OF_A_RUN and value != wanted[name]:
            raise ValueError(
                f"model.vision.{name}={wanted[name]}: that of {path} has {value}; set it so, or name another run."
            )
    entries = open_checkpoint(path).weights()
    return {e.name.removeprefix(VISION): e.read() for e in entries if e.name.startswith(VISION)}


def tokenizer_problems(path: Path, tokenizer: str) -> list[str]:
    """Why captions in a tokenizer's ids would be no text to the language model of a checkpoint, as far as it says.

    Args:
        path: Of the checkpoint. What it was trained on is read where it lay: the tokenizer's hash stands in a store.
        tokenizer: Of the captions, as a recipe names it.
    """
    what, sha256, remedy = _read_by_the_language_model(read_record(path).get("recipe"))
    if is_trained(tokenizer):
        return [f"data.tokenizer={tokenizer}: is trained on the captions, and {path} reads {what}; {remedy}."]
    own = make_tokenizer(tokenizer, []).sha256
    if sha256 is None or own == sha256:
        return []
    return [
        f"data.tokenizer={tokenizer} (sha256 {own[:12]}): the language model of {path} reads {what} (sha256"
        f" {sha256[:12]}); {remedy}."
    ]


def _read_by_the_language_model(recipe: dict[str, Any] | None) -> tuple[str, str | None, str]:
    """Its tokenizer in words, the hash if it is known, and what to do where captions have another."""
    unknown = "another tokenizer", None, "give the tokenizer.json beside its token stores"
    if recipe is None:
        return unknown
    sources = recipe["data"].get("sources", {}).values()
    if recipe["data"]["tokenizer"] == "bytes" and all(s["path"].startswith(BUILTIN_PREFIX) for s in sources):
        return "bytes", make_tokenizer("bytes", []).sha256, "set it so"
    try:
        data = rebuilt_data(recipe)
        data.setup("fit")
    except (ArgumentError, ValueError, OSError):  # of an older version; or the stores are no longer there
        return unknown
    store = next(iter(data.opened.named.values()))
    return "another tokenizer", store.tokenizer_sha256, f"give {store.tokenizer_path.resolve()}"
