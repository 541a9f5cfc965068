"""What a checkpoint that was written without ``Progress`` tells about the samples that its run consumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler, IterableDataset

from .base import MisconfigurationException, rank_zero_info
from .topology import data_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Unknown(Exception):
    """Why the samples cannot be inferred, as the end of a sentence."""


class EarlierRun(NamedTuple):
    """How far Lightning's own counters say that a run had come."""

    step: int
    """Optimizer steps."""
    batches: int
    """Batches per rank, over all epochs."""
    in_epoch: int
    """Of these, batches of the last epoch that had begun."""
    on_last: bool
    """Whether the last of them ended its epoch."""


def earlier_run(checkpoint: Mapping[str, Any], automatic_optimization: bool) -> EarlierRun:
    """The counters in a checkpoint of a begun run.

    Raises:
        Unknown: when they are missing, or do not tell which batches the optimizer had stepped on.
    """
    if not automatic_optimization:
        raise Unknown("under manual optimization Lightning does not save which batches were stepped on")
    try:
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        windows = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        begun, stepped = windows["zero_grad"]["total"]["completed"], windows["step"]["total"]["completed"]
        total, current = batches["total"]["processed"], batches["current"]["processed"]
    except KeyError as error:
        raise Unknown(f"it does not hold Lightning's counters ({error} is missing)") from None
    if begun != stepped or not total:  # gradients are dropped once per window, when it begins
        raise Unknown("it was written within an accumulation window")
    return EarlierRun(int(checkpoint["global_step"]), int(total), int(current), bool(batches["is_last_batch"]))


def batch_size_of(trainer: Trainer, earlier: Any) -> int:
    """Samples in every whole batch of the training loader, per rank; ``earlier``: what the checkpoint says, if it does.

    Raises:
        Unknown: when the loader has no such number, or the checkpoint names another one.
    """
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    if type(sampler) is not BatchSampler:
        raise Unknown("the training loader has no fixed batch size")
    if earlier not in (None, sampler.batch_size):
        raise Unknown(f"it was written with batch_size {earlier}, and the training loader has {sampler.batch_size}")
    return sampler.batch_size


def samples_per_rank(run: EarlierRun, trainer: Trainer, batch_size: int) -> int:
    """Samples that one rank had consumed, where every epoch was as long as the loader's is now.

    Raises:
        Unknown: when the last batch of an epoch is short and the epochs cannot be told apart.
    """
    lacking = _lacking_in_the_last_batch(trainer, batch_size)
    if lacking == 0:
        return run.batches * batch_size
    length = trainer.num_training_batches
    ended = run.batches - run.in_epoch
    if lacking is None or length == float("inf"):
        if ended or run.on_last:
            raise Unknown("the training loader has no length, so how short the last batch of an epoch was is unknown")
        return run.batches * batch_size
    if ended % int(length):
        raise Unknown(f"its epochs had another length than the {length} batches of the training loader")
    return run.batches * batch_size - run.batches // int(length) * lacking


def _lacking_in_the_last_batch(trainer: Trainer, batch_size: int) -> int | None:
    """Samples that an epoch's last batch has fewer than the others; None: not known."""
    loader: Any = trainer.train_dataloader
    if loader.drop_last:
        return 0
    iterable = isinstance(loader.dataset, IterableDataset)
    try:
        samples = len(loader.dataset if iterable else loader.sampler)
    except TypeError:
        return None
    whole = trainer.num_training_batches * batch_size
    return max(0, int(whole - samples))


class UncountedRun:
    """A begun run whose samples and tokens nobody counted: inferred once the loader, then a batch, can be looked at.

    Args:
        step: Optimizer steps of the run.
        samples: Samples that it consumed, if they are known.
        tokens: Tokens, likewise.
        checkpoint: What it left behind; needed where the samples are not known.
    """

    def __init__(
        self, step: int, samples: int | None, tokens: int | None, checkpoint: Mapping[str, Any] | None = None
    ) -> None:
        self.step, self.samples, self.tokens = step, samples, tokens
        self._checkpoint = checkpoint or {}
        self._batch_size: int | None = None  # where the samples were inferred by it
        self._factors = ""

    def infer_samples(self, trainer: Trainer, pl_module: LightningModule) -> int:
        """Samples consumed, over all ranks; the loader must be there.

        Raises:
            MisconfigurationException: when they or the tokens cannot be inferred.
        """
        if self.tokens is None and hasattr(pl_module, "count_batch"):
            raise self.unknown("the LightningModule's count_batch may find other tokens in every sample")
        if self.samples is None:
            try:
                run = earlier_run(self._checkpoint, pl_module.automatic_optimization)
                batch_size = batch_size_of(trainer, _saved_batch_size(self._checkpoint))
                per_rank = samples_per_rank(run, trainer, batch_size)
            except Unknown as reason:
                raise self.unknown(str(reason)) from None
            ranks = data_parallel_size(trainer)
            self.samples, self._batch_size = per_rank * ranks, batch_size
            self._factors = f" ({run.batches:,} batches of at most {batch_size} on {ranks} rank{'s' * (ranks > 1)})"
            self._checkpoint = {}
        return self.samples

    def infer_tokens(self, samples: int, tokens_per_sample: int, short: bool) -> int:
        """Tokens consumed, by the first batch that is trained on: it holds ``samples`` samples.

        Args:
            short: Whether the batch may be smaller than others.

        Raises:
            MisconfigurationException: when the batch is not what the samples were inferred by.
        """
        assert self.samples is not None
        if self._batch_size is not None and samples != self._batch_size and not (short and samples < self._batch_size):
            raise self.unknown(f"the loader has batch_size {self._batch_size}, and a batch holds {samples} samples")
        inferred = "" if self.tokens is not None else f", {tokens_per_sample} each as in the first batch"
        tokens = self.samples * tokens_per_sample if self.tokens is None else self.tokens
        rank_zero_info(
            f"Progress: the checkpoint of step {self.step} was written without it; taken as consumed:"
            f" {self.samples:,} samples{self._factors}, {tokens:,} tokens{inferred}. If that is wrong, give"
            " `Progress(samples=..., tokens=...)`."
        )
        return tokens

    def unknown(self, reason: str) -> MisconfigurationException:
        """The error that asks for the counts."""
        return MisconfigurationException(
            f"checkpoint of step {self.step}: was written without `Progress`, and what it consumed cannot be inferred:"
            f" {reason}; give it to the Trainer as `callbacks=[Progress(samples=..., tokens=...), ...]`."
        )


def _saved_batch_size(checkpoint: Mapping[str, Any]) -> Any:
    saved = [checkpoint.get(key) or {} for key in ("hyper_parameters", "datamodule_hyper_parameters")]
    return next((part["batch_size"] for part in saved if "batch_size" in part), None)
