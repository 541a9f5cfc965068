"""The data of a run: weighted token stores, validation sets, and the position that a resume starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lit_stable.callbacks.positions import Range
from lit_stable.callbacks.progress import Progress
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.data.arguments import argument_problems
from lit_stable.data.batch_sizes import batch_size_problems
from lit_stable.data.corpus import BUILTIN_PREFIX, ensure_builtin
from lit_stable.data.ledger import Ledger
from lit_stable.data.mixture import Mixture
from lit_stable.data.skip import new_ranges
from lit_stable.data.sources import Source, check_stores, has_validation, open_stores, path_problems
from lit_stable.data.store import TokenStore
from lit_stable.data.stream import Batch, TokenStream
from lit_stable.data.tokenizer import Tokenizer, load_tokenizer
from lit_stable.data.validation import ValidationWindows
from lit_stable.data.workers import leave_signals_to_the_trainer


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

    Raises:
        ValueError: with every problem of the arguments, one per line; in ``setup``, with every problem of the stores;
            in ``train_dataloader``, when the batch sizes do not fit the number of ranks or steps to skip are past.
    """

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
        problems = argument_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        self._stores: dict[str, TokenStore] = {}
        self._validation_stores: dict[str, TokenStore] = {}

    # -- what the rest of the program asks ---------------------------------------------------------------------------

    @property
    def source_names(self) -> list[str]:
        """Sources in the order of the recipe: what a batch's ``source`` counts."""
        return list(self.sources)

    @property
    def validation_names(self) -> list[str]:
        """Validation sets in the order of ``val_dataloader``; known after ``setup``."""
        return list(self._validation_stores)

    @property
    def validation_sources(self) -> dict[str, list[str]]:
        """Names of the sources that each validation set mixes, by set; known after ``setup``."""
        return {name: store.sources for name, store in self._validation_stores.items()}

    def fingerprint(self) -> dict[str, str]:
        """What the opened stores hold, by name: a resume on other data must not pass unseen."""
        named = {f"data.sources.{name}": store for name, store in self._stores.items()}
        named |= {f"data.validation.{name}": store for name, store in self._validation_stores.items()}
        return {name: f"{store.num_tokens} tokens ({store.identity})" for name, store in named.items()}

    @property
    def vocab_size(self) -> int:
        """Every token id is below it; known after ``setup``."""
        return max(store.vocab_size for store in self._all_stores())

    @property
    def eot_id(self) -> int:
        """The end-of-text token behind each document; known after ``setup``."""
        return self._all_stores()[0].eot_id

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the token stores; known after ``setup``."""
        return load_tokenizer(self._all_stores()[0].tokenizer_path)

    def samples_before(self, step: int) -> int:
        """Samples committed before optimizer step ``step``, counted from 1; by the batch-size ramp, if there is one."""
        ramp = self._ramp
        return (step - 1) * self.global_batch if ramp is None else int(ramp.samples_before(step))

    @property
    def _ramp(self) -> Any:
        """The trainer's callback that changes the global batch, known by what it can do; None: there is none."""
        callbacks = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if hasattr(callback, "samples_before")), None)

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
        problems = []
        if self._stores and vocab_size < self.vocab_size:
            problems.append(
                f"model.gpt.vocab_size={vocab_size}: must be at least {self.vocab_size}, the vocabulary of the data."
            )
        if max_length < self.sequence_length:
            problems.append(
                f"data.sequence_length={self.sequence_length}: must be at most model.gpt.max_length={max_length}."
            )
        return problems

    @property
    def needs_preparation(self) -> bool:
        """Whether a source is built in and comes into being with the first fit."""
        return any(path.startswith(BUILTIN_PREFIX) for path in self._paths())

    def unigram_entropy(self, name: str) -> float:
        """Entropy in nats of the token frequencies of a validation set: the loss of a model without context."""
        store = self._validation_stores[name]
        return ValidationWindows(store, self.sequence_length, self.validation_windows).unigram_entropy()

    def ledger(self, dropped: Sequence[Range] = ()) -> Ledger:
        """Names the samples of any step of a run that leaves out ``dropped``."""
        return Ledger(self._mixture(), list(self._stores.values()), self.sequence_length, self.samples_before, dropped)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Tokenise built-in sources on first use; Lightning calls this once per node."""
        for path in dict.fromkeys(path for path in self._paths() if path.startswith(BUILTIN_PREFIX)):
            ensure_builtin(path.removeprefix(BUILTIN_PREFIX), self.tokenizer)

    def setup(self, stage: str | None = None) -> None:
        """Open all stores, on every rank."""
        problems: list[str] = []
        training = {name: source.path for name, source in self.sources.items()}
        stores = open_stores(training, "train", self.tokenizer, "data.sources", problems)
        validation = self.validation
        if validation is None:
            validation = {name: training[name] for name in stores if has_validation(training[name], self.tokenizer)}
        validation_stores = open_stores(validation, "validation", self.tokenizer, "data.validation", problems)
        named = {f"data.sources.{name}": store for name, store in stores.items()}
        named |= {f"data.validation.{name}": store for name, store in validation_stores.items()}
        check_stores(named, self.sequence_length, problems)
        if problems:
            raise ValueError("\n".join(problems))
        self._stores, self._validation_stores = stores, validation_stores

    def train_dataloader(self) -> DataLoader[Batch]:
        """The endless stream of this rank, from where ``Progress`` stands."""
        trainer = self._attached()
        ranks = data_parallel_size(trainer)
        self.accumulation(ranks)
        progress = Progress.of(trainer)
        before = self._samples_before_from(progress)
        new = new_ranges(self.skip_steps, progress.requests, before, progress.samples, progress.dropped)
        for request, dropped in new.items():
            progress.drop([dropped], request)
        stream = TokenStream(
            self._mixture(),
            list(self._stores.values()),
            self.sequence_length,
            start=progress.samples,
            dropped=progress.dropped,
            micro_batch=self.micro_batch,
            window_at=None if self._ramp is None else self._ramp.window_at,
            rank=data_parallel_rank(trainer),
            size=ranks,
        )
        return self._loader(stream, self.num_workers)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader per validation set, in the order of ``validation_names``."""
        return self._validation_loaders(self.validation_windows)

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """As ``val_dataloader``, over every window of the sets instead of a sample of them."""
        return self._validation_loaders(None)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _validation_loaders(self, limit: int | None) -> list[DataLoader[Batch]]:
        return [
            self._loader(
                ValidationWindows(
                    store,
                    self.sequence_length,
                    limit,
                    micro_batch=self.micro_batch,
                    rank=data_parallel_rank(self._attached()),
                    size=data_parallel_size(self._attached()),
                ),
                num_workers=0,  # reading a window costs less than starting a process
            )
            for store in self._validation_stores.values()
        ]

    def path_problems(self) -> list[str]:
        """What is wrong with the paths themselves; built-in sources need not be prepared yet."""
        training = {name: source.path for name, source in self.sources.items()}
        return path_problems(training, self.validation or {}, self.tokenizer)

    def _samples_before_from(self, progress: Progress) -> Callable[[int], int]:
        # Counted from where the run stands, whatever the batch was on the way there.
        offset = progress.samples - self.samples_before(progress.steps + 1)
        return lambda step: self.samples_before(step) + offset

    def _paths(self) -> list[str]:
        return [source.path for source in self.sources.values()] + list((self.validation or {}).values())

    def _attached(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    def _all_stores(self) -> list[TokenStore]:
        return [*self._stores.values(), *self._validation_stores.values()]

    def _mixture(self) -> Mixture:
        weights = [source.weight for source in self.sources.values()]
        sizes = [store.num_windows(self.sequence_length) for store in self._stores.values()]
        return Mixture(self.source_names, weights, sizes, self.seed_data)

    def _loader(self, dataset: TokenStream | ValidationWindows, num_workers: int) -> DataLoader[Batch]:
        return DataLoader(
            dataset,
            batch_size=None,  # batches come collated
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=leave_signals_to_the_trainer,
            pin_memory=self._attached().strategy.root_device.type == "cuda",
        )
