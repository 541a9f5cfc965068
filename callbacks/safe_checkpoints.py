"""Saving and loading that cannot lose a checkpoint, change the run, or restore half of it in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from . import checkpoint_files as files
from .base import MisconfigurationException, StabilityCallback
from .checkpoint_contents import (
    CheckpointError,
    refuse_foreign,
    refuse_other_model,
    shapes_of,
    stored_shapes,
    told_as_a_sentence,
)
from .checkpoint_writer import CheckpointWriter
from .eight_bit_checkpoint import prepare_optimizers, refuse_unread
from .newest_checkpoint import whole_one_instead
from .optimizer_state import initialise_state, step_count
from .parameter_order import in_todays_order, names_by_group
from .private_names import saves_shards
from .rank_gather import gather_objects
from .shards import has_fsdp1
from .shared_folder import refuse_unshared

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: Number of the layout of what this package adds to a checkpoint; a greater one on disk is refused.
FORMAT = 1
KEY = "lit_stable"
_SHADOWED = (
    *("save_checkpoint", "remove_checkpoint"),
    *("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"),
)


class SafeCheckpoints(StabilityCallback):
    """Make every save atomic and checked, and every load complete or refused, under any strategy.

    Saving: the checkpoint is written as ``NAME.partial``, synced to disk and renamed; a kill at any moment, or a full
    disk, leaves the previous one whole: a checkpoint that ``ModelCheckpoint`` or another callback removes meanwhile
    is deleted when the new one is on disk. Sharded folders get a list of checksums, computed by all ranks together. The
    names of the parameters in each of the optimizer's groups are saved too.

    Loading: the checksums are compared first; a damaged file is named together with the newest usable checkpoint
    beside it. What is no Lightning checkpoint, or has weights of other names or shapes than the model, is refused.
    Gradients are set to ``None`` before the load (with one alive, FSDP2 restores no optimizer state and says nothing),
    and afterwards the optimizer's step counts are compared with those that were saved. Where the optimizer's state is
    saved by place (one device, DDP), parameters that changed places within a group get their own moments; one that
    changed its group is refused under any strategy, since schedulers save their rates by a group's place.

    Over several hosts: where each rank writes its part, every rank must see the folders that checkpoint callbacks save
    to, which is tried before the first step; and no checkpoint is published whose files not every rank sees.

    Adam's and AdamW's state exists from the start of the fit (see :func:`~.optimizer_state.initialise_state`).

    Paths with a scheme (``s3://...``) are left to Lightning as they are. Nothing is logged.

    Args:
        in_background: Copy the checkpoint to the host's memory, as many bytes as the file has (on CUDA up to twice as
            many, page-locked and kept for the next save), and write the copy while training goes on: rank 0 a file,
            or each rank its shards. The next save, a load and the end of the fit wait for it. The error of a write that
            failed, of shards on any rank, is raised there, or after the batch in which it did; after another exception
            it is a warning. A strategy that writes in a way of its own (DeepSpeed) does so at once; one warning says
            so.

    Attributes:
        listeners: By name, what is called on every rank with the path of a checkpoint that is about to be written.
        loaded: Path of the checkpoint that was loaded last.

    Raises:
        CheckpointError: when a checkpoint cannot be written, is damaged, foreign or of another model or optimizer, has
            a newer format, or its optimizer state was not restored. It is a ``MisconfigurationException``.
        MisconfigurationException: when a checkpoint is a folder and the strategy reads files, or not every host sees
            the folder that shards are to be saved to.

    Example::

        >>> Trainer(callbacks=[SafeCheckpoints()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 90

    def __init__(self, in_background: bool = False) -> None:
        self._writer = CheckpointWriter(in_background)
        self._strategy: Any = None
        self.listeners: dict[str, Callable[[Path], None]] = {}
        self.loaded = Path()
        self._saved_counts: list[int | None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_asynchronous_saves(trainer)
        self._writer.open(trainer)
        if self._strategy is trainer.strategy:  # the fit before ended with an exception, so without a teardown
            return
        # On the instance: the one place to act just before a load, and around a save, whatever the strategy.
        strategy = self._strategy = trainer.strategy
        strategy.save_checkpoint = self._writer.around(trainer, strategy.save_checkpoint, self.listeners)  # type: ignore[method-assign]
        strategy.remove_checkpoint = self._writer.around_removal(strategy.remove_checkpoint)  # type: ignore[method-assign]
        strategy.load_checkpoint = self._around_load(trainer, strategy.load_checkpoint)  # type: ignore[method-assign]
        strategy.load_model_state_dict = self._around_weights(trainer, strategy.load_model_state_dict)  # type: ignore[method-assign]
        strategy.load_optimizer_state_dict = self._around_optimizers(trainer, strategy.load_optimizer_state_dict)  # type: ignore[method-assign]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if saves_shards(trainer):
            for folder in _folders(trainer):
                refuse_unshared(folder)
        for optimizer in trainer.optimizers:
            initialise_state(optimizer)

    @property
    def in_background(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self._writer.in_background

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background: a file on rank 0 alone, shards on all ranks."""
        return self._writer.is_writing

    def finish(self) -> None:
        """Wait for a checkpoint that is being written in the background.

        Raises:
            CheckpointError: when it could not be written.
        """
        self._writer.finish()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._writer.finish_if_written()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.finish()
        if self._strategy is not None:
            for name in _SHADOWED:
                self._strategy.__dict__.pop(name, None)
        self._strategy = self._saved_counts = None
        self._writer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stay in place: who saves on an exception does so after this hook, and must be guarded too."""
        try:
            self._writer.give_up()
        except Exception as second:
            self.warn_of_second(exception, second)

    # -- saving ------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint.setdefault(KEY, {}).update(
            format=FORMAT,
            optimizer_steps=[step_count(optimizer) for optimizer in trainer.optimizers],
            parameters=[names_by_group(optimizer, pl_module) for optimizer in trainer.optimizers],
        )

    # -- loading -----------------------------------------------------------------------------------------------------

    def _around_load(self, trainer: Trainer, load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def load_checkpoint(checkpoint_path: Any, **options: Any) -> dict[str, Any]:
            self.finish()
            is_remote = "://" in str(checkpoint_path)
            path = Path(checkpoint_path).expanduser()  # as Lightning has it where it saves
            fits = trainer.state.fn == "fit"
            self.loaded = path
            # Those that shard fill the model and the optimizers within the load; others leave it to Lightning.
            fills = not trainer.strategy.lightning_restore_optimizer
            if trainer.lightning_module is not None:
                trainer.lightning_module.zero_grad(set_to_none=True)
            with told_as_a_sentence(path):
                if not is_remote:
                    self._refuse_damaged(trainer, path)
                    if fills:
                        _compare_with_model(trainer, path, options.get("weights_only") is not False)
                if fits:
                    prepare_optimizers(path, trainer.optimizers)
                checkpoint = _load_what_it_can(trainer, load, checkpoint_path if is_remote else path, **options)
            if not fills:
                refuse_foreign(path, checkpoint, needs_optimizer=fits)
            found = checkpoint.get(KEY, {}).get("format", 0)
            if found > FORMAT:
                raise CheckpointError(
                    f"{path}: has checkpoint format {found}, and this version reads up to {FORMAT}; upgrade lit-stable."
                )
            if fits:
                self._saved_counts = checkpoint.get(KEY, {}).get("optimizer_steps")
            if fits and fills:
                self._in_order(trainer, checkpoint)
            return checkpoint

        return load_checkpoint

    def _around_weights(self, trainer: Trainer, load: Callable[..., None]) -> Callable[..., None]:
        def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            try:
                load(checkpoint, strict=strict)
            except RuntimeError:  # here and not earlier: the module's `on_load_checkpoint` may have mended the weights
                refuse_other_model(self.loaded, shapes_of(checkpoint["state_dict"]), trainer.lightning_module, strict)
                raise

        return load_model_state_dict

    def _around_optimizers(self, trainer: Trainer, load: Callable[..., None]) -> Callable[..., None]:
        def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
            load(self._in_order(trainer, checkpoint))

        return load_optimizer_state_dict

    def _in_order(self, trainer: Trainer, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        saved = checkpoint.get(KEY, {}).get("parameters")
        if saved is None:  # written without this callback
            return checkpoint
        found = [names_by_group(optimizer, trainer.lightning_module) for optimizer in trainer.optimizers]
        return in_todays_order(self.loaded, checkpoint, saved, found)

    @staticmethod
    def _refuse_damaged(trainer: Trainer, path: Path) -> None:
        if trainer.is_global_zero:
            files.recover(path)
        trainer.strategy.barrier()
        found = gather_objects(files.damage(path, trainer.global_rank, trainer.world_size))
        wrong = next((phrase for phrase in found if phrase), None)
        if wrong is None:
            return
        raise CheckpointError(f"{wrong}; {whole_one_instead(path, 'resume from')}.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_unread(trainer.optimizers)
        for optimizer in trainer.optimizers:  # an FSDP2 load drops the state of tensors that take no gradient
            initialise_state(optimizer)
        saved, self._saved_counts = self._saved_counts, None
        if saved is None:
            return
        for index, (optimizer, expected) in enumerate(zip(trainer.optimizers, saved, strict=False)):
            found = step_count(optimizer)
            if expected is not None and found != expected:
                raise CheckpointError(
                    f"optimizer {index}: its step count after the load is {found} and the checkpoint says {expected},"
                    " so its state was not restored; make sure the optimizer and its parameter groups are those that"
                    " wrote the checkpoint."
                )


def _folders(trainer: Trainer) -> list[Path]:
    """Where callbacks that say so save, Lightning's and others', but for places with a scheme."""
    named = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return [Path(folder) for folder in named if folder is not None and "://" not in str(folder)]


def wait_for_saves(trainer: Trainer) -> None:
    """Return when every checkpoint that was saved is on disk."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SafeCheckpoints):
            callback.finish()


def refuse_asynchronous_saves(trainer: Trainer) -> None:
    """Raise where a plugin returns from a save before the file is there: nothing can be checked or renamed then."""
    kinds = {kind.__name__ for kind in type(trainer.strategy.checkpoint_io).__mro__}  # one class in each namespace
    if "AsyncCheckpointIO" in kinds:
        raise MisconfigurationException(
            "`AsyncCheckpointIO`: goes on before a checkpoint is on disk, so `SafeCheckpoints` could neither check nor"
            " rename it; delete the plugin and give the callback in_background=True, or delete the callback."
        )


def _compare_with_model(trainer: Trainer, path: Path, weights_only: bool) -> None:
    if path.is_dir() and not (path / ".metadata").is_file():  # no format of torch's: DeepSpeed's
        return
    stored, module = stored_shapes(path, weights_only, trainer.state.fn == "fit"), trainer.lightning_module
    if not has_fsdp1(trainer.strategy.model):  # it flattens what it shards
        refuse_other_model(path, stored, module, module.strict_loading)


def _load_what_it_can(
    trainer: Trainer, load: Callable[..., dict[str, Any]], path: Any, **options: Any
) -> dict[str, Any]:
    try:
        return load(path, **options)
    except IsADirectoryError as error:
        raise MisconfigurationException(
            f"{path}: is a sharded checkpoint, which {type(trainer.strategy).__name__} cannot read; use the strategy"
            " that wrote it (lit-stable: --trainer.strategy fsdp2), on any number of ranks."
        ) from error
