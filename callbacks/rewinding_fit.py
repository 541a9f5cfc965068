"""A fit that may step back: as often as the recovery ladder asks, it goes on from an earlier checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import MisconfigurationException
from .branch_end import newest_of_branch
from .private_fsdp_names import forget_fsdp1_wrapper, keep_fsdp1_wrapper
from .recovery import Recovery
from .recovery_exit import Rewind

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

AUTO = "auto"


def fit_with_recovery(
    trainer: Trainer,
    module: LightningModule,
    datamodule: Any = None,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> None:
    """``trainer.fit`` with :class:`~.recovery.Recovery` among the callbacks: a rewind is another fit from its target.

    In one process and on all ranks together: the ladder raises out of the fit, and the next one loads the checkpoint
    into the same module. Bounded by the budgets of the rungs.

    Args:
        trainer: With a ``Recovery``.
        module: As ``trainer.fit`` takes it, with the next two and ``options``.
        datamodule: Or loaders; a loader that is given is made once, so that only one that reads where it stands when
            it is begun, as with :class:`~.resuming_batches.ResumingBatches`, drops anything.
        train_dataloaders: See there.
        val_dataloaders: See there.
        ckpt_path: Where to begin. ``auto``: where the ledger says that the run is, after a kill too: the target of a
            rewind that had not begun, or the newest checkpoint of the branch; from the start where there is no ledger.

    Raises:
        MisconfigurationException: when the trainer has no ``Recovery``.
        RecoveryStopped: when the ladder has come to its end; a script should then exit with ``recovery_exit.STOPPED``.
    """
    recovery = next((c for c in trainer.callbacks if isinstance(c, Recovery)), None)  # type: ignore[attr-defined]
    if recovery is None:
        raise MisconfigurationException(
            "`fit_with_recovery`: the trainer has no `Recovery` among its callbacks; put one there, or call"
            " trainer.fit."
        )
    folder = recovery.folder or Path(trainer.default_root_dir)
    path: str | Path | None = newest_of_branch(folder) if ckpt_path == AUTO else ckpt_path
    recovery.is_driven = True
    try:
        while True:
            recovery.begins_with = path
            try:
                trainer.fit(
                    module,
                    train_dataloaders=train_dataloaders,
                    val_dataloaders=val_dataloaders,
                    datamodule=datamodule,
                    ckpt_path=path,
                    **options,
                )
                return
            except Rewind as rewind:
                if recovery.restart:
                    raise
                path = rewind.path
                keep_fsdp1_wrapper(trainer)
    finally:
        forget_fsdp1_wrapper(trainer)
        recovery.is_driven = False
