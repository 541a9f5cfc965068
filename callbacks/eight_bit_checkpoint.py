"""Checkpoints whose optimizer state is in 8 bit: told from others before and after a load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkpoint_contents import CheckpointError
from .eight_bit_layout import Bits
from .eight_bit_optimizer import STATE_MAP, is_blockwise
from .eight_bit_states import KEYS

_BITS: dict[str, Bits] = {keys[0]: bits for bits, keys in KEYS.items()}  # one key of each form is enough to tell it
_CODES = KEYS[8][0]


def prepare_optimizers(path: Path, optimizers: Sequence[Any]) -> None:
    """Before a sharded checkpoint is loaded: have converted optimizers expect its form, refuse what others cannot read.

    A checkpoint in one file needs no preparation, see :func:`refuse_unread`.

    Raises:
        CheckpointError: when no optimizer here could read it.
        MisconfigurationException: when its form is not to be converted.
    """
    if not (path / ".metadata").is_file():
        return
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    keys = list(FileSystemReader(path).read_metadata().state_dict_metadata)
    for index, optimizer in enumerate(optimizers):
        own = [key.removeprefix(f"optimizer_{index}.") for key in keys if key.startswith(f"optimizer_{index}.")]
        kept = saved_bits(own)
        if is_blockwise(optimizer):
            optimizer.expect(kept, names_map=any(key.endswith(f".{STATE_MAP}") for key in own))
        elif 8 in kept.values():
            raise CheckpointError(_unread(path, optimizer))


def saved_bits(keys: Sequence[str]) -> dict[str, Bits]:
    """Bits of the moments of every parameter, by its name, from the keys of an optimizer in a sharded checkpoint."""
    parted = [key.removeprefix("state.").rpartition(".") for key in keys]
    return {name: _BITS[last] for name, _, last in parted if last in _BITS}


def refuse_unread(optimizers: Sequence[Any]) -> None:
    """After a load: raise when an optimizer was given 8-bit moments that it does not know.

    torch restores whatever stands in a state; the first step would end with a bare KeyError, or with fresh moments.

    Raises:
        CheckpointError: with what to add to the run.
    """
    for optimizer in optimizers:
        if not is_blockwise(optimizer) and any(_CODES in state for state in optimizer.state.values()):
            raise CheckpointError(_unread("the checkpoint", optimizer))


def _unread(what: Path | str, optimizer: Any) -> str:
    return (
        f"{what}: its optimizer state is in 8 bit, and {type(optimizer).__name__} reads 32; add `EightBitAdam`, with"
        " bits=32 and on_load='convert' to go on in 32 bit."
    )
