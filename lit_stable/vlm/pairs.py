"""Images with captions as token stores with an image beside each window, so that all that reads windows reads pairs."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lit_stable.data.atomic_folder import new_folder
from lit_stable.data.store_writer import TokenStoreWriter
from lit_stable.data.text.preparation import TOKENIZER_FILE
from lit_stable.data.tokenizer import make_tokenizer

IMAGES = "images.npy"
_VALIDATION_SHARE = 0.1
Images = npt.NDArray[np.uint8]


class Pairs(NamedTuple):
    """Images (N, C, height, width) and their captions (N)."""

    images: Images
    captions: list[str]

    def identity(self, *more: object) -> str:
        """A hash of all images and captions, and of what else they are prepared by."""
        sha256 = hashlib.sha256(self.images.tobytes())
        sha256.update("\0".join([*self.captions, str(self.images.shape), *map(str, more)]).encode())
        return sha256.hexdigest()


def pair_folder(pairs: Pairs, tokenizer: str, length: int, cache: Path) -> Path:
    """Where pairs lie once they are prepared: named after all that the files follow from."""
    file = Path(tokenizer)
    spec = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else tokenizer
    return cache / f"pairs-{pairs.identity(spec, length, _VALIDATION_SHARE)[:16]}"


def write_pairs(pairs: Pairs, folder: Path, tokenizer: str, length: int, report: Callable[[str], None] = print) -> None:
    """Write the stores ``train`` and ``validation``, one window of ``length`` tokens for each caption.

    A window is end-of-text, the caption, and end-of-text up to its end; ``images.npy`` beside the store holds the image
    of each. A tenth of the images, chosen by their content, are for validation.

    Raises:
        ValueError: when a caption does not fit, or a split would be empty.
        FileExistsError: when the folder exists.
    """
    encoder = make_tokenizer(tokenizer, pairs.captions)
    ids = encoder.encode_batch(pairs.captions)
    longest = max(range(len(ids)), key=lambda n: len(ids[n]))
    if (needed := len(ids[longest]) + 2) > length:
        raise ValueError(
            f"data.sequence_length={length}: the caption {pairs.captions[longest]!r} needs {needed} with end-of-text"
            " before and behind it; lengthen the sequences or shorten the caption."
        )
    held_out = np.array([zlib.crc32(image.tobytes()) % 1000 < 1000 * _VALIDATION_SHARE for image in pairs.images])
    splits = {"train": np.flatnonzero(~held_out), "validation": np.flatnonzero(held_out)}
    if empty := [name for name, chosen in splits.items() if not len(chosen)]:
        raise ValueError(f"data.path: of {len(ids)} images none is left for {empty[0]}; give more.")
    with new_folder(folder) as out:
        sha256 = encoder.save(out / TOKENIZER_FILE)
        for name, chosen in splits.items():
            with TokenStoreWriter(
                out / name,
                vocab_size=encoder.vocab_size,
                eot_id=encoder.eot_id,
                tokenizer=f"../{TOKENIZER_FILE}",
                tokenizer_sha256=sha256,
                split=name,
            ) as writer:
                _write_windows(writer, [ids[n] for n in chosen], length, encoder.eot_id)
            np.save(out / name / IMAGES, pairs.images[chosen])
    counts = ", ".join(f"{len(chosen):,} for {name}" for name, chosen in splits.items())
    report(f"images with captions: {counts}, prepared in {folder}")


def _write_windows(writer: TokenStoreWriter, ids: list[npt.NDArray[np.int64]], length: int, eot_id: int) -> None:
    for caption in ids:
        window = np.full(length - 1, eot_id, dtype=np.int64)  # the writer adds one more behind each
        window[1 : len(caption) + 1] = caption
        writer.add(window, "pairs")
    writer.add([], "pairs")  # the last label of the last window
