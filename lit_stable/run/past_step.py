"""What a run read at any of its steps, from its folder and its data alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from jsonargparse import ArgumentParser

from lit_stable.callbacks import BatchSizeWarmup, SequenceLengthWarmup
from lit_stable.callbacks.ignored_label import IGNORED
from lit_stable.data.batch_sizes import samples_before
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.ledger import Ledger, Sample
from lit_stable.data.stream import TokenStream
from lit_stable.run.beginnings import Beginning, session_of_step
from lit_stable.run.branch import read_mapping
from lit_stable.systems import DEFAULT, system


class ReadSample(NamedTuple):
    """A sample as a rank trained on it."""

    rank: int
    micro_batch: int
    sample: Sample
    tokens: torch.Tensor
    """Inputs, (T,); under a sequence-length warm-up those that were left."""
    masked: int
    """Labels without a loss."""


class PastStep:
    """One optimizer step of a run.

    Of several sessions that read a step, the last one counts: what the ones before it did there was undone. A step that
    lies before a branch was read by the run that it left; ``folder`` is the one that read it.

    Args:
        folder: Run folder.
        step: Optimizer step, counted from 1; one that is still to come is read as the last session would.

    Raises:
        ValueError: when the step is below 1, the folder holds no run, or its data are not there or not the same.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self.folder, self.beginning = session_of_step(folder, step)
        self.recipe_path = self.folder / f"recipe-{self.beginning.session:02d}.yaml"
        self.data, self._ramp, self._lengths = _rebuilt(read_mapping(self.recipe_path))
        self.data.setup("fit")
        self.data.reshuffles = list(self.beginning.reshuffles)
        _require_same_data(self.data, self.beginning)
        begun = self.beginning.steps, self.beginning.samples
        before = partial(samples_before, global_batch=self.data.global_batch, ramp=self._ramp)
        self.consumed = before(step, *begun), before(step + 1, *begun)

    @property
    def length(self) -> int:
        """Positions per row that the step was trained on."""
        return self.data.sequence_length if self._lengths is None else self._lengths.length(self.step)

    @property
    def trained_tokens(self) -> int:
        """Tokens of each sample that the step was trained on, in one row or in several."""
        whole = self.data.sequence_length
        melts = self._lengths is not None and self._lengths.mode == "melt"
        return whole // self.length * self.length if melts else self.length

    def read(self, ranks: list[int] | None = None) -> Iterator[ReadSample]:
        """The samples of the given ranks, all by default, micro-batch after micro-batch.

        Raises:
            ValueError: when there was no such rank.
        """
        wrong = [rank for rank in ranks or [] if not 0 <= rank < self.beginning.ranks]
        if wrong:
            raise ValueError(
                f"rank={wrong[0]}: the step was read by data-parallel ranks 0 to {self.beginning.ranks - 1}."
            )
        for rank in range(self.beginning.ranks) if ranks is None else ranks:
            yield from self._read_rank(rank)

    def _read_rank(self, rank: int) -> Iterator[ReadSample]:
        stream, ledger = self._stream(rank), self._ledger()
        left = (self.consumed[1] - self.consumed[0]) // self.beginning.ranks
        for number, positions in enumerate(stream.positions()):
            batch = stream.read(positions)
            rows = zip(ledger.samples(positions), batch["input_ids"], batch["labels"], strict=True)
            for sample, inputs, labels in itertools.islice(rows, left):
                kept = slice(self.trained_tokens)
                yield ReadSample(rank, number, sample, inputs[kept], int((labels[kept] == IGNORED).sum()))
            left -= len(positions)
            if left <= 0:
                return

    def _stream(self, rank: int) -> TokenStream:
        return self.data.stream(
            start=self.consumed[0],
            dropped=self.beginning.dropped,
            window_at=None if self._ramp is None else self._ramp.window_at,
            rank=rank,
            size=self.beginning.ranks,
        )

    def _ledger(self) -> Ledger:
        return self.data.ledger(self.beginning.dropped)


def rebuilt_data(recipe: dict[str, Any]) -> TokenDataModule:
    """The data module of a resolved recipe, with nothing opened yet."""
    return _rebuilt(recipe)[0]


def _rebuilt(recipe: dict[str, Any]) -> tuple[TokenDataModule, BatchSizeWarmup | None, SequenceLengthWarmup | None]:
    """The data module of a resolved recipe, and the features that change how much of it a step reads."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(system(recipe.get("system", DEFAULT)).data, "data")
    parser.add_argument("--ramp", type=Optional[BatchSizeWarmup], default=None)  # noqa: UP045 - a runtime type
    parser.add_argument("--lengths", type=Optional[SequenceLengthWarmup], default=None)  # noqa: UP045
    found = {"ramp": _callback(recipe, BatchSizeWarmup), "lengths": _callback(recipe, SequenceLengthWarmup)}
    built = parser.instantiate_classes(parser.parse_object({"data": recipe["data"], **found}))
    for feature in (built.ramp, built.lengths):
        if feature is not None:
            feature.adopt(built.data)
    return built.data, built.ramp, built.lengths


def _callback(recipe: dict[str, Any], kind: type) -> dict[str, Any] | None:
    """What a resolved recipe says of a callback, wherever it stands in there."""
    named = dict(recipe["stability"])
    listed = recipe["trainer"]["callbacks"] or []
    everything = [
        *(named.pop("extra", None) or {}).values(),
        *named.values(),
        *(listed if isinstance(listed, list) else [listed]),
    ]
    return next((one for one in everything if one and one["class_path"].rpartition(".")[2] == kind.__name__), None)


def _require_same_data(data: TokenDataModule, beginning: Beginning) -> None:
    now = data.fingerprint()
    for name, was in beginning.stores.items():
        if now.get(name) != was and name.startswith("data.sources."):
            raise ValueError(
                f"{name}: holds {now.get(name)}, and the run read {was}; put the old data back to see its batches."
            )
