"""Name the samples of any optimizer step, past or future, without ever having stored them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lit_stable.callbacks.positions import Range, stream_position
from lit_stable.data.mixture import Mixture
from lit_stable.data.order import Indices
from lit_stable.data.store import DocumentPlace, TokenStore
from lit_stable.data.stream import stream_positions
from lit_stable.data.tokenizer import Tokenizer, load_tokenizer


class Sample(NamedTuple):
    """One training sample: its index in the stream, where its tokens came from, and what they say."""

    position: int
    source: str
    epoch: int
    window: int
    documents: list[DocumentPlace]
    text: str


class Ledger:
    """What a run reads at a step: a function of the data, the seed and the dropped ranges.

    Args:
        mixture: The order of samples.
        stores: The token store of each source of the mixture.
        sequence_length: Tokens per sample.
        samples_before: Samples committed before an optimizer step, counted from 1.
        dropped: Ranges of stream positions that the run leaves out, sorted and merged.
    """

    def __init__(
        self,
        mixture: Mixture,
        stores: Sequence[TokenStore],
        sequence_length: int,
        samples_before: Callable[[int], int],
        dropped: Sequence[Range] = (),
    ) -> None:
        self._mixture = mixture
        self._stores = list(stores)
        self._sequence_length = sequence_length
        self._samples_before = samples_before
        self._dropped = list(dropped)
        self._tokenizer: Tokenizer | None = None

    def step(self, step: int) -> list[Sample]:
        """The samples of optimizer step ``step``, over all ranks and micro-batches, in the order of consumption.

        Raises:
            ValueError: when ``step`` is below 1.
        """
        if step < 1:
            raise ValueError(f"step={step}: optimizer steps count from 1.")
        consumed = np.arange(self._samples_before(step), self._samples_before(step + 1))
        return self.samples(stream_positions(consumed, self._dropped))

    def samples(self, positions: Indices) -> list[Sample]:
        """The samples at stream ``positions`` (N,)."""
        located = zip(positions.tolist(), *(part.tolist() for part in self._mixture.locate(positions)), strict=True)
        return [self._sample(*place) for place in located]

    def counts(self, step: int) -> dict[str, int]:
        """Samples of each source that the run has read before optimizer step ``step``: the proportions, exactly."""
        position = stream_position(self._samples_before(step), self._dropped)
        counts = self._mixture.counts(position)
        for start, stop in self._dropped:
            if start < position:
                counts = counts - (self._mixture.counts(min(stop, position)) - self._mixture.counts(start))
        return dict(zip(self._mixture.sources, counts.tolist(), strict=True))

    def _sample(self, position: int, source: int, epoch: int, window: int) -> Sample:
        store = self._stores[source]
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(store.tokenizer_path)  # mixed stores share one tokenizer
        start = window * self._sequence_length
        # The inputs of the window; the one token more that serves as last label belongs to the next window as well.
        stop = start + self._sequence_length
        text = self._tokenizer.decode(store.read(start, stop).tolist())
        return Sample(position, self._mixture.sources[source], epoch, window, store.documents_in(start, stop), text)
