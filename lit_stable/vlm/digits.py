"""Images with captions that need no download: scikit-learn's handwritten digits, described by a rule."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from lit_stable.vlm.pairs import Pairs

Words = Literal["full", "names"]
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# About a third of the digits lie on each side of both, and a third between.
_THIN, _BOLD = 0.285, 0.325  # mean ink, 0 to 1
_LEANING = 0.08  # columns to the right per row upwards


def digit_pairs(words: Words) -> Pairs:
    """The 1797 grey images of 8 x 8 pixels (E. Alpaydin and C. Kaynak, UCI), each with its caption.

    Raises:
        ValueError: when scikit-learn, which brings them along, is not there.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "data.path=builtin:digits: comes with scikit-learn; pip install 'lit-stable[vlm]', or give a folder."
        ) from error
    found = load_digits()
    images: npt.NDArray[np.float64] = found.images / 16  # (N, 8, 8), 0 to 1
    captions = [describe(image, int(digit), words) for image, digit in zip(images, found.target, strict=True)]
    return Pairs((images[:, None] * 255).round().astype(np.uint8), captions)


def describe(image: npt.NDArray[np.float64], digit: int, words: Words) -> str:
    """The caption of an image of ink (8, 8), 0 to 1.

    Example::

        >>> describe(np.eye(8)[::-1], 1, "full")
        'a thin one, leaning right'
    """
    if words == "names":
        return NAMES[digit]
    ink, slant = image.mean(), _slant(image)
    weight = "thin" if ink < _THIN else "bold" if ink > _BOLD else "plain"
    lean = "leaning right" if slant > _LEANING else "leaning left" if slant < -_LEANING else "upright"
    return f"a {weight} {NAMES[digit]}, {lean}"


def _slant(image: npt.NDArray[np.float64]) -> float:
    """Columns to the right per row upwards, by second moments."""
    rows, columns = np.mgrid[: image.shape[0], : image.shape[1]]
    mass = image / image.sum()
    rows, columns = rows - (mass * rows).sum(), columns - (mass * columns).sum()
    return float(-(mass * rows * columns).sum() / (mass * rows**2).sum())
