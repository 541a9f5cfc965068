"""Saving and loading that cannot lose a checkpoint, change the run, or restore half of it in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from . import checkpoint_files as files
from .base import MisconfigurationException, StabilityCallback
from .optimizer_state import initialise_state, step_count

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: Number of the layout of what this package adds to a checkpoint; a greater one on disk is refused.
FORMAT = 1
KEY = "lit_stable"


class SafeCheckpoints(StabilityCallback):
    """Make every save atomic and checked, and every load complete or refused, under any strategy.

    Saving: the checkpoint is written as ``NAME.partial``, synced to disk and renamed; a kill at any moment leaves the
    previous one whole. Sharded folders get a list of checksums, computed by all ranks together.

    Loading: the checksums are compared first; a damaged file is named together with the newest usable checkpoint
    beside it. Gradients are set to ``None`` before the load (with one alive, FSDP2 restores no optimizer state and
    says nothing), and afterwards the optimizer's step counts are compared with those that were saved.

    Adam's and AdamW's state exists from the start of the fit (see :func:`~.optimizer_state.initialise_state`).

    Paths with a scheme (``s3://...``) are left to Lightning as they are. Nothing is logged.

    Raises:
        MisconfigurationException: when a checkpoint is damaged, has a newer format, or its optimizer state was not
            restored.

    Example::

        >>> Trainer(callbacks=[SafeCheckpoints()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 90

    def __init__(self) -> None:
        self._strategy: Any = None
        self._saved_counts: list[int | None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._strategy is trainer.strategy:  # the fit before ended with an exception, so without a teardown
            return
        # On the instance: the one place to act just before a load, and around a save, whatever the strategy.
        strategy = self._strategy = trainer.strategy
        strategy.save_checkpoint = self._around_save(trainer, strategy.save_checkpoint)  # type: ignore[method-assign]
        strategy.load_checkpoint = self._around_load(trainer, strategy.load_checkpoint)  # type: ignore[method-assign]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            initialise_state(optimizer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._strategy is not None:
            for name in ("save_checkpoint", "load_checkpoint"):
                self._strategy.__dict__.pop(name, None)
        self._strategy = self._saved_counts = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stay in place: who saves on an exception does so after this hook, and must be guarded too."""

    # -- saving ------------------------------------------------------------------------------------------------------

    def _around_save(self, trainer: Trainer, save: Callable[..., None]) -> Callable[..., None]:
        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            if "://" in str(filepath):
                save(checkpoint, filepath, storage_options=storage_options)
                return
            path = Path(trainer.strategy.broadcast(str(filepath)))
            partial = files.partial_path(path)
            if trainer.is_global_zero:
                files.remove(partial)  # left over from a kill
            trainer.strategy.barrier()
            save(checkpoint, partial, storage_options=storage_options)
            trainer.strategy.barrier()
            if partial.is_dir():
                self._write_checksums(trainer, partial)
            if trainer.is_global_zero:
                files.publish(path)
            trainer.strategy.barrier()

        return save_checkpoint

    @staticmethod
    def _write_checksums(trainer: Trainer, folder: Path) -> None:
        own = files.shard_files(folder)[trainer.global_rank :: trainer.world_size]
        entries = [{str(p.relative_to(folder)): files.checksum(p) for p in own}]
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(gathered, entries[0])
            entries = gathered
        if trainer.is_global_zero:
            files.write_checksums(folder, {name: entry for part in entries for name, entry in part.items()})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        counts = [step_count(optimizer) for optimizer in trainer.optimizers]
        checkpoint.setdefault(KEY, {}).update(format=FORMAT, optimizer_steps=counts)

    # -- loading -----------------------------------------------------------------------------------------------------

    def _around_load(self, trainer: Trainer, load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if "://" not in str(checkpoint_path):
                self._refuse_damaged(trainer, Path(checkpoint_path))
            if trainer.lightning_module is not None:
                trainer.lightning_module.zero_grad(set_to_none=True)
            try:
                checkpoint = load(checkpoint_path, *args, **kwargs)
            except IsADirectoryError as error:
                raise MisconfigurationException(
                    f"{checkpoint_path}: is a sharded checkpoint, which {type(trainer.strategy).__name__} cannot read;"
                    " use the strategy that wrote it (lit-stable: --trainer.strategy fsdp2), on any number of ranks."
                ) from error
            found = checkpoint.get(KEY, {}).get("format", 0)
            if found > FORMAT:
                raise MisconfigurationException(
                    f"{checkpoint_path}: has checkpoint format {found}, and this version reads up to {FORMAT};"
                    " upgrade lit-stable."
                )
            if trainer.state.fn == "fit":
                self._saved_counts = checkpoint.get(KEY, {}).get("optimizer_steps")
            return checkpoint

        return load_checkpoint

    @staticmethod
    def _refuse_damaged(trainer: Trainer, path: Path) -> None:
        if trainer.is_global_zero:
            files.recover(path)
        trainer.strategy.barrier()
        found = [files.damage(path, trainer.global_rank, trainer.world_size)]
        if trainer.world_size > 1:
            gathered: list[str | None] = [None] * trainer.world_size
            dist.all_gather_object(gathered, found[0])
            found = gathered
        wrong = next((phrase for phrase in found if phrase), None)
        if wrong is None:
            return
        usable = files.newest_usable(path.parent, but=path)
        remedy = f"resume from {usable}" if usable else f"no other usable checkpoint lies in {path.parent}"
        raise MisconfigurationException(f"{wrong}; {remedy}.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:  # an FSDP2 load drops the state of tensors that take no gradient
            initialise_state(optimizer)
        saved, self._saved_counts = self._saved_counts, None
        if saved is None:
            return
        for index, (optimizer, expected) in enumerate(zip(trainer.optimizers, saved, strict=False)):
            found = step_count(optimizer)
            if expected is not None and found != expected:
                raise MisconfigurationException(
                    f"optimizer {index}: its step count after the load is {found} and the checkpoint says {expected},"
                    " so its state was not restored; make sure the optimizer and its parameter groups are those that"
                    " wrote the checkpoint."
                )
