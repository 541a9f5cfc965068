"""The backbones' trained weights: which checkpoint a recipe means, and what is taken from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from lit_stable.data.corpus import BUILTIN_PREFIX
from lit_stable.diagnosis.checkpoint_tensors import open_checkpoint
from lit_stable.run.folder import checkpoints, find_checkpoint, newest_run_with_checkpoint
from lit_stable.vlm.options import VisionOptions
from lit_stable.weights.stored_model import read_record

VISION = "sight.vision."  # in front of its names in a VLMModule
SIGHT = "sight"  # in a checkpoint's record: the options of new blocks and vision backbone
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
    """Why captions in a tokenizer's ids would be no text to the language model of a checkpoint, as far as it says."""
    data: dict[str, Any] = read_record(path).get("recipe", {}).get("data", {})
    sources = data.get("sources", {}).values()
    if not any(source["path"].startswith(BUILTIN_PREFIX) for source in sources):  # theirs lies beside their tokens
        return []
    own = data["tokenizer"]
    if own == tokenizer or Path(tokenizer).is_file():
        return []
    remedy = "set it so" if own == "bytes" else "give the tokenizer.json beside its token stores"
    return [f"data.tokenizer={tokenizer}: the language model of {path} reads {own}; {remedy}."]
