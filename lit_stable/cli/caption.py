"""`lit-stable caption CKPT`: what a checkpoint's model says of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jsonargparse import ArgumentParser

from lit_stable.cli.checkpoint_argument import CHECKPOINT, add_root, named_checkpoint
from lit_stable.data.tokenizer import Tokenizer
from lit_stable.run.past_step import rebuilt_data
from lit_stable.vlm.captioning import open_vlm, write_captions
from lit_stable.vlm.datamodule import PairDataModule
from lit_stable.vlm.image_folder import read_image
from lit_stable.weights.stored_model import open_model

_SHADES = " .:-=+*#%@"


def run_caption(argv: Sequence[str]) -> None:
    """Parse the arguments of ``caption``; print images of the run's validation set, or of files, with captions."""
    parser = ArgumentParser(
        prog="lit-stable caption", description="Describe images with the model of a checkpoint, in fp32."
    )
    parser.add_argument("checkpoint", type=str, help=CHECKPOINT)
    parser.add_argument("--images", nargs="+", type=Path, default=[], help="Files, instead of the validation set.")
    parser.add_argument("--count", type=int, default=4, help="Of the validation set's images, evenly spread.")
    parser.add_argument("--temperature", type=float, default=0.0, help="Divides the logits; 0: the most likely token.")
    parser.add_argument("--seed", type=int, default=0, help="Of the draws.")
    parser.add_argument("--draw", type=bool, default=True, help="Print the images too, in letters.")
    add_root(parser)
    arguments = parser.parse_args(list(argv))
    if arguments.count < 1:
        raise ValueError(f"count={arguments.count}: must be at least 1.")
    path = named_checkpoint(arguments.checkpoint, arguments.root)
    gpt, sight = open_vlm(path)
    data = _data(path)
    if arguments.images:
        images = np.stack([read_image(image, data.image_size, data.channels) for image in arguments.images])
        truths = [str(image) for image in arguments.images]
    else:
        images, truths = data.examples(arguments.count)
    tokenizer: Tokenizer = data.text_tokenizer()
    found = write_captions(
        gpt,
        sight,
        torch.from_numpy(images),
        tokenizer.eot_id,
        data.sequence_length - 1,
        arguments.temperature,
        arguments.seed,
    )
    for image, truth, ids in zip(images, truths, found, strict=True):
        if arguments.draw:
            print(drawn(image))
        print(f"{truth}\n  -> {tokenizer.decode(ids)}\n")


def drawn(image: np.ndarray) -> str:
    """An image (C, height, width), 0 to 255, in letters, two for a pixel."""
    shades = image.mean(0).astype(int) * len(_SHADES) // 256
    return "\n".join("".join(2 * _SHADES[shade] for shade in row) for row in shades.tolist())


def _data(path: Path) -> PairDataModule:
    record = open_model(path).record
    if "recipe" not in record:
        raise ValueError(
            f"{path}: does not say what it was trained on; go on with it for a step, and give what that saves."
        )
    data = rebuilt_data(record["recipe"])
    assert isinstance(data, PairDataModule)
    data.prepare_data()
    data.setup("fit")
    return data
