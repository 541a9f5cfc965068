"""Images with captions, read as text is: the order, the position and the validation sets are those of token stores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_stable.callbacks.accumulation import AverageOver
from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.ignored_label import IGNORED
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.data.corpus import cache_folder
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.order import Indices
from lit_stable.data.sources import Source
from lit_stable.data.stream import Batch, TokenStream
from lit_stable.data.validation import ValidationWindows
from lit_stable.data.workers import make_loader
from lit_stable.vlm.digits import Words, digit_pairs
from lit_stable.vlm.image_folder import folder_pairs
from lit_stable.vlm.pairs import IMAGES, Images, Pairs, pair_folder, write_pairs

DIGITS = "builtin:digits"


@judges_arguments(ValueError, "data")
class PairDataModule(TokenDataModule):
    """Batches of images and captions, in an order that survives any resume, as that of ``TokenDataModule``.

    A batch holds ``images``, uint8 (micro_batch, channels, size, size), and ``input_ids``, ``labels`` and ``source`` as
    for text. Inputs begin with end-of-text; labels behind the end-of-text that ends a caption are ignored.

    Args:
        sequence_length: Tokens per caption, with end-of-text before and behind it.
        micro_batch: Samples per rank and forward pass.
        global_batch: Samples per optimizer step, over all ranks and micro-batches; under a ramp, at its end.
        path: ``builtin:digits``, or a folder of images with a ``captions.jsonl``.
        words: Of the digits' captions. ``full``: stroke, digit and slant; ``names``: the digit alone.
        image_size: Height and width of an image; those of a folder are brought to it.
        channels: 1: grey; 3: red, green, blue.
        validation_windows: Samples in validation, evenly spread; None: all.
        tokenizer: ``bytes``, ``bpe:SIZE`` or the path of a tokenizer JSON: that of the language model.
        seed_data: Chooses the order of the samples and nothing else.
        num_workers: Processes that read ahead.
        skip_steps: Optimizer steps whose data are left out, as ``13251-14000``.
        average_over: As in ``TokenDataModule``; captions differ in length.

    Raises:
        ValueError: with every problem of the arguments, one per line; in ``prepare_data``, when the images cannot be
            read or a caption does not fit.
    """

    def __init__(
        self,
        sequence_length: int,
        micro_batch: int,
        global_batch: int,
        path: str = DIGITS,
        words: Words = "full",
        image_size: int = 8,
        channels: int = 1,
        validation_windows: int | None = 200,
        tokenizer: str = "bytes",
        seed_data: int = 1,
        num_workers: int = 0,
        skip_steps: list[str | int] | None = None,
        average_over: AverageOver = "micro_batches",
    ) -> None:
        self.path = path
        self.words = words
        self.image_size = image_size
        self.channels = channels
        self._pairs: Pairs | None = None
        self._folder: Path | None = None
        problems = (
            []
            if path != DIGITS or (image_size, channels) == (8, 1)
            else [f"data.image_size={image_size}, channels={channels}: the digits have 8 pixels and 1 channel."]
        )
        try:
            super().__init__(
                {"pairs": Source(path)},
                sequence_length,
                micro_batch,
                global_batch,
                validation_windows=validation_windows,
                tokenizer=tokenizer,
                seed_data=seed_data,
                num_workers=num_workers,
                skip_steps=skip_steps,
                average_over=average_over,
            )
        except ValueError as error:
            problems += str(error).splitlines()
        if problems:
            raise ValueError("\n".join(problems))

    # -- what is read ------------------------------------------------------------------------------------------------

    def pairs(self) -> Pairs:
        """All images and captions, as they are before any of it is prepared."""
        if self._pairs is None:
            if self.path == DIGITS:
                self._pairs = digit_pairs(self.words)
            else:
                self._pairs = folder_pairs(Path(self.path).expanduser(), self.image_size, self.channels)
        return self._pairs

    @property
    def folder(self) -> Path:
        """Where they lie once they are prepared: named after all of them, so that who asks first reads them all."""
        if self._folder is None:
            self._folder = pair_folder(self.pairs(), self.tokenizer, self.sequence_length, cache_folder())
        return self._folder

    @property
    def needs_preparation(self) -> bool:
        return not self.folder.exists()

    def path_problems(self) -> list[str]:
        try:
            self.pairs()
        except ValueError as error:
            return str(error).splitlines()
        return []

    def prepare_data(self) -> None:
        """Tokenise the captions on first use; Lightning calls this once per node."""
        if self.needs_preparation:
            try:
                write_pairs(self.pairs(), self.folder, self.tokenizer, self.sequence_length)
            except FileExistsError:
                print(f"{self.folder}: another process prepared it first")

    def setup(self, stage: str | None = None) -> None:
        """Open what is prepared; of several ranks the first alone has read the images to find it."""
        if self.trainer is not None:
            first = self.trainer.is_global_zero
            self._folder = Path(self.trainer.strategy.broadcast(str(self.folder) if first else ""))
        self._pairs = None
        self.sources = {"pairs": Source(str(self.folder))}
        super().setup(stage)

    def fingerprint(self) -> dict[str, str]:
        return {**super().fingerprint(), "data.images": self.folder.name}

    def unigram_entropy(self, name: str) -> float:
        """Entropy in nats of the frequencies of the validation set's labels that are not ignored."""
        batches = self._validation(rank=0, ranks=1, limit=self.validation_windows)[0]
        labels = torch.cat([batch["labels"].flatten() for batch in batches])
        counts = torch.bincount(labels[labels != IGNORED])
        frequencies = counts[counts > 0].double() / counts.sum()
        return float(-(frequencies * frequencies.log()).sum())

    def examples(self, count: int) -> tuple[Images, list[str]]:
        """Images of the validation set, evenly spread, (N, C, size, size), and their captions."""
        batches = list(self._validation(rank=0, ranks=1, limit=count)[0])
        images = np.concatenate([batch["images"].numpy() for batch in batches])
        tokenizer, captions = self.text_tokenizer(), []
        for labels in torch.cat([batch["labels"] for batch in batches]):
            kept = labels[labels != IGNORED].tolist()
            captions.append(tokenizer.decode(kept[:-1]))
        shown = min(count, len(self.opened.validation["pairs"].documents) - 1)
        return images[:shown], captions[:shown]

    # -- batches -----------------------------------------------------------------------------------------------------

    def stream(self, **place: Any) -> TokenStream:
        stores = list(self.opened.training.values())
        images = ImagesBeside([store.path for store in stores])
        return PairStream(
            images, self.eot_id, self.mixture(), stores, self.sequence_length, micro_batch=self.micro_batch, **place
        )

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        return self._validation_loaders(self.validation_windows)

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        return self._validation_loaders(None)

    def _validation_loaders(self, limit: int | None) -> list[DataLoader[Batch]]:
        trainer = self._attached()
        sets = self._validation(data_parallel_rank(trainer), data_parallel_size(trainer), limit)
        return [make_loader(each, 0, trainer.strategy.root_device) for each in sets]

    def _validation(self, rank: int, ranks: int, limit: int | None) -> list[PairWindows]:
        options = {"micro_batch": self.micro_batch, "rank": rank, "size": ranks}
        return [
            PairWindows(ImagesBeside([store.path]), self.eot_id, store, self.sequence_length, limit, **options)
            for store in self.opened.validation.values()
        ]


class ImagesBeside:
    """The images of the windows of stores; only paths travel to worker processes."""

    def __init__(self, stores: Sequence[Path]) -> None:
        self.paths = [store / IMAGES for store in stores]
        self._opened: dict[int, Images] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_opened": {}}

    def of(self, store: int, windows: Sequence[int] | Indices) -> Images:
        """(N, C, height, width)."""
        if store not in self._opened:
            self._opened[store] = np.load(self.paths[store], mmap_mode="r")
        return np.ascontiguousarray(self._opened[store][windows])


class PairStream(TokenStream):
    """A ``TokenStream`` with the image of each window."""

    def __init__(self, images: ImagesBeside, eot_id: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.images, self.eot_id = images, eot_id

    def read(self, positions: Indices) -> Batch:
        batch = super().read(positions)
        sources, _, windows = self.mixture.locate(positions)
        rows = [
            self.images.of(source, [window]) for source, window in zip(sources.tolist(), windows.tolist(), strict=True)
        ]
        return {
            **batch,
            "labels": up_to_the_end(batch["labels"], self.eot_id),
            "images": torch.from_numpy(np.concatenate(rows)),
        }


class PairWindows(ValidationWindows):
    """``ValidationWindows`` with the image of each; rows that fill up have that of the first."""

    def __init__(self, images: ImagesBeside, eot_id: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.images, self.eot_id = images, eot_id

    def read(self, batch: int) -> Batch:
        result = super().read(batch)
        start = (batch * self.size + self.rank) * self.micro_batch
        windows = np.zeros(self.micro_batch, dtype=np.int64)
        own = self.windows[start : start + self.micro_batch]
        windows[: len(own)] = own
        labels = up_to_the_end(result["labels"], self.eot_id)
        return {**result, "labels": labels, "images": torch.from_numpy(self.images.of(0, windows))}


def up_to_the_end(labels: Tensor, eot_id: int) -> Tensor:
    """Labels (B, T) with all behind the first end-of-text ignored."""
    ends = labels == eot_id
    behind = ends.cumsum(1) - ends.long() > 0
    return labels.masked_fill(behind, IGNORED)
