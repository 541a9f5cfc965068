"""Measures that tell text from what a broken pipeline makes of it.

The classic case: a deduplication step that escaped its output again and again, until documents were megabytes of
backslashes. A model learns such text at once, its perplexity falls, and nothing looks wrong.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lit_stable.data.repeats import in_repeats

ESCAPE_RUN = 8  # so many backslashes, each at most two characters behind the one before: no code looks like that
ESCAPE_GAP = 3
NGRAM = 3
FEW_NGRAMS = 64  # a shorter document is no sample of anything
REPEAT_PERIOD, REPEAT_COUNT = 13, 8
COMPRESSED_BYTES = 1 << 20  # of a document; the rest is like it or is found by the other measures
SMALL_BYTES = 1024


class Measures(NamedTuple):
    """What was measured on one document.

    Args:
        escapes: Share of its bytes in runs of at least 8 backslashes with at most two other characters between them.
        repeats: Share of its tokens in stretches that hold a period of 1 to 13 tokens at least 8 times.
        entropy: Entropy of its token trigrams over that of trigrams that are all different, 0 to 1; 1 for less than 64.
        compression: Its bytes over those of their zlib compression; 1 for less than 1024.
    """

    escapes: float
    repeats: float
    entropy: float
    compression: float


@dataclass(frozen=True)
class ArtefactLimits:
    """From where on a measure marks a document as an artefact.

    Args:
        escapes: Above this share of bytes in runs of escapes.
        repeats: Above this share of tokens in repetitions.
        entropy: Below this relative entropy of trigrams.
        compression: Above this ratio of compression.
    """

    escapes: float = 0.1
    repeats: float = 0.3
    entropy: float = 0.4
    compression: float = 15.0

    def problems(self) -> list[str]:
        """What is wrong with the values."""
        shares = {"escapes": self.escapes, "repeats": self.repeats, "entropy": self.entropy}
        problems = [
            f"limits.{name}={value}: must be between 0 and 1." for name, value in shares.items() if not 0 <= value <= 1
        ]
        if self.compression < 1:
            problems.append(f"limits.compression={self.compression}: must be at least 1.")
        return problems

    def exceeded(self, measures: Measures) -> tuple[str, ...]:
        """Names of the measures that mark the document."""
        return tuple(
            name
            for name, value, limit in zip(measures._fields, measures, self._limits(), strict=True)
            if (value < limit if name == "entropy" else value > limit)
        )

    def _limits(self) -> tuple[float, float, float, float]:
        return self.escapes, self.repeats, self.entropy, self.compression


def measure(content: bytes, ids: npt.NDArray[np.integer]) -> Measures:
    """Measure one document.

    Args:
        content: Its text in UTF-8.
        ids: Its tokens, (N,).
    """
    repeated = in_repeats(ids[None], REPEAT_PERIOD, REPEAT_COUNT)
    return Measures(
        _escapes(content), float(repeated.mean()) if ids.size else 0.0, _entropy(ids), _compression(content)
    )


def _escapes(content: bytes) -> float:
    if content.count(b"\\") < ESCAPE_RUN:
        return 0.0
    places = np.flatnonzero(np.frombuffer(content, dtype=np.uint8) == ord("\\"))
    cuts = np.flatnonzero(np.diff(places) > ESCAPE_GAP) + 1
    firsts, lasts = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(places)]]) - 1
    long = lasts - firsts + 1 >= ESCAPE_RUN
    return float((places[lasts[long]] - places[firsts[long]] + 1).sum() / len(content))


def _entropy(ids: npt.NDArray[np.integer]) -> float:
    count = len(ids) - NGRAM + 1
    if count < FEW_NGRAMS:
        return 1.0
    wide = ids.astype(np.uint64)
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(NGRAM):  # a hash: two trigrams of a document meet in it once in 2^64 pairs
        mixed = (mixed ^ wide[place : place + count]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    frequencies = np.unique(mixed, return_counts=True)[1] / count
    return float(abs((frequencies * np.log(frequencies)).sum()) / np.log(count))


def _compression(content: bytes) -> float:
    if len(content) < SMALL_BYTES:
        return 1.0
    sample = content[:COMPRESSED_BYTES]
    return len(sample) / len(zlib.compress(sample, 1))
