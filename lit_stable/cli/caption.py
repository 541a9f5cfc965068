"""`lit-stable caption CKPT`: what a checkpoint's model says of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from lit_stable.cli.checkpoint_argument import CHECKPOINT, add_root, named_checkpoint

if TYPE_CHECKING:
    import numpy as np

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

    import numpy as np  # late, with what follows: it takes seconds
    import torch

    from lit_stable.vlm.captioning import data_of_run, open_vlm, write_captions
    from lit_stable.vlm.image_folder import read_image

    gpt, sight = open_vlm(path)
    data = data_of_run(path)
    if arguments.images:
        images = np.stack([read_image(image, data.image_size, data.channels) for image in arguments.images])
        truths = [str(image) for image in arguments.images]
    else:
        images, truths = data.examples(arguments.count)
    tokenizer = data.text_tokenizer()
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
