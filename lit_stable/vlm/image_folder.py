"""A folder of images with captions: ``captions.jsonl`` beside the files that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_stable.vlm.pairs import Pairs

FILE = "captions.jsonl"


def folder_pairs(folder: Path, size: int, channels: int) -> Pairs:
    """Read a folder whose ``captions.jsonl`` has a line ``{"image": "cats/1.png", "caption": "a cat"}`` per pair.

    Args:
        folder: Paths of images count from it.
        size: Height and width that images are brought to.
        channels: 1: images become grey; 3: coloured.

    Raises:
        ValueError: with a line for each of the first problems: a line that is none, an image that cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f'data.path={folder}: holds no {FILE}; write a line {{"image": "PATH", "caption": "TEXT"}} per image.'
        )
    images, captions, problems = [], [], []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # and nowhere else: captions may hold a U+2028
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error}); save it so.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            name, caption = _pair(line)
            images.append(read_image(folder / name, size, channels))
            captions.append(caption)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise ValueError("\n".join([*problems[:5], *([f"and {len(problems) - 5} more."] if len(problems) > 5 else [])]))
    if not images:
        raise ValueError(f"{path}: has no pair; write one per line.")
    return Pairs(np.stack(images), captions)


def read_image(path: Path, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """One image, (channels, size, size), 0 to 255.

    Raises:
        ValueError: when it cannot be read, or Pillow is not there.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"{path}: images are read by Pillow; pip install 'lit-stable[vlm]'.") from error
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if channels == 1 else "RGB").resize((size, size))
    except OSError as error:
        raise ValueError(f"{path}: is no image that can be read ({error}).") from error
    pixels = np.asarray(image, dtype=np.uint8)  # (size, size) or (size, size, 3)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _pair(line: str) -> tuple[str, str]:
    try:
        pair: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error}).") from error
    if not (isinstance(pair, dict) and isinstance(pair.get("image"), str) and isinstance(pair.get("caption"), str)):
        raise ValueError("must hold the texts image and caption.")
    if not pair["caption"]:
        raise ValueError("its caption is empty.")
    return pair["image"], pair["caption"]
