"""The data of a run: weighted token stores, validation sets, and the position that a resume starts from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lit_stable.callbacks.accumulation import AverageOver
from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.positions import Range
from lit_stable.callbacks.progress import Progress
from lit_stable.callbacks.rank_agreement import on_every_rank
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.data.arguments import argument_problems
from lit_stable.data.batch_sizes import batch_size_problems, ramp_of, samples_before
from lit_stable.data.corpus import BUILTIN_PREFIX, ensure_builtin
from lit_stable.data.epochs import SampleOrder
from lit_stable.data.ledger import Ledger
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.mixture import SHUFFLED, Mixture
from lit_stable.data.opened import OpenedData, length_problems, open_data
from lit_stable.data.reshuffle import Settled, as_reshuffles, settle, with_rewinds
from lit_stable.data.skip import new_ranges
from lit_stable.data.sources import Source, path_problems
from lit_stable.data.stream import Batch, TokenStream
from lit_stable.data.tokenizer import Tokenizer, load_tokenizer
from lit_stable.data.validation import ValidationWindows, validation_loaders
from lit_stable.data.weights import WeightSchedule
from lit_stable.data.workers import make_loader


@judges_arguments(ValueError, "data")
class TokenDataModule(LightningDataModule):
    """Training batches from a weighted mixture of token stores, in an order that survives any resume.

    The order is a pure function of ``seed_data`` and the number of consumed samples, which ``Progress`` counts and
    checkpoints: after a resume the loader starts there, also with another micro-batch, other ranks or workers.

    A batch holds ``input_ids`` and ``labels`` (next tokens, -100 where ignored), int64 (micro_batch, sequence_length),
    and ``source``, int64 (micro_batch,): the index into ``source_names``, in validation into the set's own sources.

    Args:
        sources: Training data by name.
        sequence_length: Tokens per sample.
        micro_batch: Samples per rank and forward pass.
        global_batch: Samples per optimizer step, over all ranks and micro-batches; under a ramp, at its end.
        validation: Paths of the validation sets by name; None: the validation split of each source that has one.
        validation_windows: Samples per validation set, evenly spread; None: all.
        tokenizer: For built-in sources: ``bytes``, ``bpe:SIZE`` or the path of a tokenizer JSON.
        seed_data: Chooses the order of the samples and nothing else.
        num_workers: Processes that read ahead.
        skip_steps: Optimizer steps whose data are left out, as ``13251-14000``; whole global batches.
        order: The order of samples within a source, and from where on what is left is shuffled anew.
        weight_schedule: Weights as a function of the position, in place of those of the sources.
        validation_from: Date from which on documents are not trained on, YYYY-MM-DD or yyyymmdd; those of each source
            that has some become the validation set ``SOURCE_from_DATE``. Documents without a date are left out.
        mask_repeats: Which repetitions have no loss in training; None: all tokens do.
        average_over: What an optimizer step is the mean over. ``tokens``: all labels that count, alike;
            ``micro_batches``: the means of all micro-batches, alike.

    Raises:
        ValueError: with every problem of the arguments, one per line; in ``setup``, with every problem of the stores;
            in ``train_dataloader``, when the batch sizes do not fit the number of ranks or steps to skip are past.
    """

    #: What ``Recovery`` asks of whoever reads the data.
    leaves_out_dropped = True
    #: What ``Progress`` asks: batches have one shape and never end, so ranks need not talk about them.
    alike_on_ranks = True

    def __init__(
        self,
        sources: dict[str, Source],
        sequence_length: int,
        micro_batch: int,
        global_batch: int,
        validation: dict[str, str] | None = None,
        validation_windows: int | None = 200,
        tokenizer: str = "bpe:2048",
        seed_data: int = 1,
        num_workers: int = 1,
        skip_steps: list[str | int] | None = None,
        order: SampleOrder = SHUFFLED,
        weight_schedule: WeightSchedule | None = None,
        validation_from: str | int | None = None,
        mask_repeats: MaskRepeats | None = None,
        average_over: AverageOver = "micro_batches",
    ) -> None:
        super().__init__()
        self.sources = dict(sources)
        self.sequence_length = sequence_length
        self.micro_batch = micro_batch
        self.global_batch = global_batch
        self.validation = None if validation is None else dict(validation)
        self.validation_windows = validation_windows
        self.tokenizer = tokenizer
        self.seed_data = seed_data
        self.num_workers = num_workers
        self.skip_steps = list(skip_steps or [])
        self.order = order
        self.weight_schedule = weight_schedule
        self.validation_from = validation_from
        self.mask_repeats = mask_repeats
        self.average_over = average_over
        problems = argument_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        self.opened = OpenedData()
        self.reshuffles: list[Settled] | None = None  # None: no run has said where it stands

    # -- what the rest of the program asks ---------------------------------------------------------------------------

    @property
    def source_names(self) -> list[str]:
        """Sources in the order of the recipe: what a batch's ``source`` counts."""
        return list(self.sources)

    @property
    def validation_names(self) -> list[str]:
        """Validation sets in the order of ``val_dataloader``; known after ``setup``."""
        return list(self.opened.validation)

    @property
    def validation_sources(self) -> dict[str, list[str]]:
        """Names of the sources that each validation set mixes, by set; known after ``setup``."""
        return {name: store.sources for name, store in self.opened.validation.items()}

    def fingerprint(self) -> dict[str, str]:
        """What the opened stores hold, by name: a resume on other data must not pass unseen."""
        return self.opened.fingerprint()

    @property
    def vocab_size(self) -> int:
        """Every token id is below it; known after ``setup``."""
        return self.opened.vocab_size

    @property
    def eot_id(self) -> int:
        """The end-of-text token behind each document; known after ``setup``."""
        return self.opened.eot_id

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the token stores; known after ``setup``."""
        return load_tokenizer(self.opened.tokenizer_path)

    def samples_before(self, step: int, steps: int = 0, samples: int = 0) -> int:
        """Samples committed before optimizer step ``step``, counted from 1; by the batch-size ramp, if there is one.

        Args:
            step: The step.
            steps: Steps that the run has behind it.
            samples: Samples that it consumed in them.
        """
        return samples_before(step, steps, samples, self.global_batch, ramp_of(self.trainer))

    def accumulation(self, ranks: int) -> int:
        """Micro-batches per optimizer step on each of ``ranks`` data-parallel ranks.

        Raises:
            ValueError: when ``global_batch`` is no multiple of ``micro_batch * ranks``; names the nearest that are.
        """
        problems = batch_size_problems(self.micro_batch, self.global_batch, ranks)
        if problems:
            raise ValueError("\n".join(problems))
        return self.global_batch // (self.micro_batch * ranks)

    def model_problems(self, vocab_size: int, max_length: int) -> list[str]:
        """What keeps a model with that many embedding rows and that context length from training on these data.

        The vocabulary can be judged after ``setup`` only.
        """
        return self.opened.model_problems(vocab_size) + length_problems(self.sequence_length, max_length)

    @property
    def needs_preparation(self) -> bool:
        """Whether a source is built in and comes into being with the first fit."""
        return any(path.startswith(BUILTIN_PREFIX) for path in self._paths())

    def unigram_entropy(self, name: str) -> float:
        """Entropy in nats of the token frequencies of a validation set: the loss of a model without context."""
        store = self.opened.validation[name]
        return ValidationWindows(store, self.sequence_length, self.validation_windows).unigram_entropy()

    def ledger(self, dropped: Sequence[Range] = ()) -> Ledger:
        """Names the samples of any step of a run that leaves out ``dropped``."""
        stores = list(self.opened.training.values())
        return Ledger(self.mixture(dropped), stores, self.sequence_length, self.samples_before, dropped)

    def mixture(self, dropped: Sequence[Range] = ()) -> Mixture:
        """The order of samples of a run that leaves out ``dropped``; known after ``setup``."""
        settled = self.reshuffles
        if settled is None:
            settled = settle(self.order.reshuffle, [], self.samples_before, 0, dropped)
        names, length, schedule = self.source_names, self.sequence_length, self.weight_schedule
        weights = [s.weight for s in self.sources.values()] if schedule is None else schedule.blocks(names, length)
        sizes = [store.num_windows(length) for store in self.opened.training.values()]
        return Mixture(names, weights, sizes, self.seed_data, self.order, as_reshuffles(settled))

    def stream(self, **place: Any) -> TokenStream:
        """The micro-batches of one rank, from a position on; ``place`` as ``TokenStream`` takes it."""
        stores, options = list(self.opened.training.values()), {"mask_repeats": self.mask_repeats, **place}
        return TokenStream(self.mixture(), stores, self.sequence_length, micro_batch=self.micro_batch, **options)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Tokenise built-in sources on first use; Lightning calls this once per node."""
        for path in dict.fromkeys(path for path in self._paths() if path.startswith(BUILTIN_PREFIX)):
            ensure_builtin(path.removeprefix(BUILTIN_PREFIX), self.tokenizer)

    def setup(self, stage: str | None = None) -> None:
        """Open all stores, on every rank: where one of them cannot, none goes on."""
        by_date = self.order.by == "date"
        stores = (self.sources, self.validation, self.validation_from, self.tokenizer, self.sequence_length, by_date)
        opened = partial(open_data, *stores)
        self.opened = opened() if self.trainer is None else on_every_rank("its data", opened)

    def state_dict(self) -> dict[str, Any]:
        """The reshuffles of this run, with their positions; nothing when there are none."""
        return {"reshuffles": [list(reshuffle) for reshuffle in self.reshuffles]} if self.reshuffles else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint says of the run that it belongs to."""
        self.reshuffles = [Settled(*reshuffle) for reshuffle in state_dict["reshuffles"]]

    def train_dataloader(self) -> DataLoader[Batch]:
        """The endless stream of this rank, from where ``Progress`` stands."""
        trainer = self._attached()
        ranks = data_parallel_size(trainer)
        self.accumulation(ranks)
        progress = Progress.of(trainer)
        # Counted from where the run stands, whatever the batch was on the way there.
        before = partial(self.samples_before, steps=progress.steps, samples=progress.samples)
        new = new_ranges(self.skip_steps, progress.requests, before, progress.samples, progress.dropped)
        for request, dropped in new.items():
            progress.drop([dropped], request)
        known = self.reshuffles or []
        # Before the first sample nothing was seen: what is asked for at once is meant for the order that is.
        chosen = progress.dropped if progress.samples else ()
        settled = settle(self.order.reshuffle, known, before, progress.samples, progress.dropped, chosen)
        self.reshuffles = with_rewinds(settled, progress.reshuffles)
        stream = self.stream(
            start=progress.samples,
            dropped=progress.dropped,
            window_at=getattr(ramp_of(trainer), "window_at", None),
            rank=data_parallel_rank(trainer),
            size=ranks,
        )
        return make_loader(stream, self.num_workers, trainer.strategy.root_device)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader per validation set, in the order of ``validation_names``."""
        stores = list(self.opened.validation.values())
        return validation_loaders(
            stores, self.sequence_length, self.validation_windows, self.micro_batch, self._attached()
        )

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """As ``val_dataloader``, over every window of the sets instead of a sample of them."""
        stores = list(self.opened.validation.values())
        return validation_loaders(stores, self.sequence_length, None, self.micro_batch, self._attached())

    # -- parts -------------------------------------------------------------------------------------------------------

    def path_problems(self) -> list[str]:
        """What is wrong with the paths themselves; built-in sources need not be prepared yet."""
        training = {name: source.path for name, source in self.sources.items()}
        return path_problems(training, self.validation or {}, self.tokenizer)

    def _paths(self) -> list[str]:
        return [source.path for source in self.sources.values()] + list((self.validation or {}).values())

    def _attached(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer
