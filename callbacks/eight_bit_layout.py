"""Which optimizer states are kept in 8 bit: chosen once, from a parameter's whole shape and the module that owns it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from .module_patterns import is_norm, own_parameters, select
from .wrapper_names import unwrapped

Bits = Literal[8, 32]

BLOCK = 256  # elements that share a maximum: that of bitsandbytes' optimizers
WHY_8 = "8 bit"


@dataclass(frozen=True)
class StateRules:
    """What :class:`~.eight_bit_adam.EightBitAdam` was told, less what is not about the choice."""

    bits: Bits = 8
    min_8bit_size: int = 4096
    embedding_bits: Bits = 32
    keep_32_bit: Sequence[str] = ()


@dataclass(frozen=True)
class TensorPlan:
    """How the two moments of one parameter are kept.

    Attributes:
        name: Of the parameter, as before anything was wrapped.
        bits: 8 or 32.
        why: ``8 bit``, or the reason for 32, as the table at the start shows it.
        parameters: Elements of the whole parameter.
        num_bytes: Of both moments and their block maxima, over all shards, each counted once.
        last_block: Elements in the last block of each row; 256 where the row's length is a multiple of 256.
    """

    name: str
    bits: Bits
    why: str
    parameters: int
    num_bytes: int
    last_block: int = BLOCK

    @property
    def label(self) -> str:
        """Name of the row of `state_table` that counts it."""
        if self.bits == 32:
            return f"32 bit: {self.why}"
        return self.why if self.last_block == BLOCK else f"{self.why}: last block short"


def plan_states(module: nn.Module, rules: StateRules) -> dict[nn.Parameter, TensorPlan]:
    """Choose for every parameter of a module, sharded or not, trained or not.

    The choice is a function of the whole shape, never of the shard, so it is the same on any number of ranks. It is
    made by the modules as they are now: a weight that an embedding shares with a head is an embedding.

    Raises:
        MisconfigurationException: when a pattern of ``keep_32_bit`` selects nothing.
    """
    owners = list(module.modules())
    embeddings = {p for m in owners if is_embedding(m) for p in own_parameters(m)}
    norms = {p for m in owners if is_norm(m) for p in own_parameters(m)}
    named = select(module, rules.keep_32_bit, "with") if rules.keep_32_bit else set()
    plans = {}
    for name, parameter in ((unwrapped(name), p) for name, p in module.named_parameters()):
        why = WHY_8
        if rules.bits == 32:
            why = "bits=32"
        elif name in named:
            why = "keep_32_bit"
        elif parameter in embeddings and rules.embedding_bits == 32:
            why = "embedding"
        elif parameter in norms:
            why = "norm"
        elif parameter.ndim < 2:
            why = "bias or vector"
        elif parameter.numel() < rules.min_8bit_size:
            why = "small"
        elif eight_bit_bytes(parameter) > 4 * parameter.numel():
            why = "short rows"
        size = eight_bit_bytes(parameter) if why == WHY_8 else 8 * parameter.numel()
        last = columns_of(parameter) % BLOCK or BLOCK
        plans[parameter] = TensorPlan(name, 8 if why == WHY_8 else 32, why, parameter.numel(), size, last)
    return plans


def columns_of(parameter: Tensor) -> int:
    """Elements in a row: the product of all dimensions after the first."""
    return math.prod(parameter.shape[1:])


def eight_bit_bytes(parameter: Tensor) -> int:
    """Bytes of both moments in 8 bit: two codes an element, and two fp32 maxima a block; blocks end with each row."""
    return 2 * parameter.numel() + 2 * 4 * parameter.shape[0] * -(-columns_of(parameter) // BLOCK)


def is_embedding(module: nn.Module) -> bool:
    """Whether a module looks rows up by index; by type, and by the names that projects give their own types."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or any(
        t.__name__.endswith("Embedding") for t in type(module).__mro__
    )


def state_table(plans: Iterable[TensorPlan]) -> str:
    """What is kept in 8 and in 32 bit and why, with bytes over all shards; and what that saves.

    8-bit tensors whose row length is no multiple of 256 are counted apart: each of their rows ends in a shorter block,
    where bitsandbytes' blocks continue into the next row.
    """
    plans = list(plans)
    rows = [("state", "tensors", "parameters", "bytes", "per parameter")]
    for label in sorted({plan.label for plan in plans}, key=lambda label: (not label.startswith(WHY_8), label)):
        rows.append(_row(label, [plan for plan in plans if plan.label == label]))
    rows.append(_row("all", plans))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in rows]  # fmt: skip
    return "\n".join([*lines, f"{saving(plans):.1%} less than moments in 32 bit"])


def saving(plans: Iterable[TensorPlan]) -> float:
    """Share of the bytes of 32-bit moments that these plans save."""
    plans = list(plans)
    full = sum(8 * plan.parameters for plan in plans)
    return 1 - sum(plan.num_bytes for plan in plans) / full if full else 0.0


def _row(label: str, plans: list[TensorPlan]) -> tuple[str, str, str, str, str]:
    parameters, size = sum(p.parameters for p in plans), sum(p.num_bytes for p in plans)
    return label, f"{len(plans):,}", f"{parameters:,}", f"{size:,}", f"{size / max(1, parameters):.3f}"
