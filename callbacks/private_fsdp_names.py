"""The private names of FSDP1, and of Lightning's strategy for it, that are used: see :mod:`.private_names`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def fsdp1_shards(model: nn.Module) -> tuple[set[nn.Parameter], Any]:
    """Parameters that FSDP1 keeps as local shards, and the process group they are sharded over.

    With ``use_orig_params`` a shard looks like any small plain parameter: only its handle knows. The public
    ``clip_grad_norm_`` would also tell the norm but rewrites every gradient, with NaN when the norm is infinite.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    shards: set[nn.Parameter] = set()
    group = None
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        group = module.process_group
        shards.update((handle.flat_param._params or ()) if handle._use_orig_params else [handle.flat_param])
    return shards, group


def reshard_fsdp1(model: nn.Module) -> None:
    """Free the parameters that FSDP1 keeps gathered after a forward pass without a backward pass: those of its root.

    FSDP1 does not gather again what is gathered, so the next forward pass would use the weights from before the step.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils

    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            _runtime_utils._reshard(module, handle, True)


def keep_fsdp1_wrapper(trainer: Trainer) -> None:
    """Let the next fit of the model that was just trained take the wrapper of FSDP1 around it; ``forget`` undoes it.

    Lightning wraps again what it finds bare. Where only parts of the model are wrapped units it takes them for the
    user's own and leaves out the wrapper around the whole, whose flat pieces then stand for parameters.
    """
    strategy: Any = trainer.strategy
    wrapper = strategy.model
    if type(wrapper).__name__ == "FullyShardedDataParallel":
        strategy._setup_model = lambda model: (
            wrapper if wrapper.module is model else type(strategy)._setup_model(strategy, model)
        )


def forget_fsdp1_wrapper(trainer: Trainer) -> None:
    """Undo :func:`keep_fsdp1_wrapper`; nothing happens where nothing was kept."""
    trainer.strategy.__dict__.pop("_setup_model", None)
