"""Dropout of attention weights that does not depend on how the heads are spread over devices.

Kernels draw the mask inside, from the state of the generator and the index of the head among those they are given: on
a device that holds half of the heads they would draw another mask than on one that holds all. So the heads are taken
in groups, each with a random stream of its own; a device runs the kernel once for each of the groups that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lit_stable.callbacks.seeds import mix

# Enough for every tensor-parallel size within a node, few enough for the kernel to have work in each call.
_MOST_GROUPS = 8

Kernel = Callable[[Tensor, Tensor, Tensor, slice, float], Tensor]


def dropout_groups(heads: int) -> int:
    """Groups that draw a mask together: the largest divisor of the key and value heads that also divides 8."""
    return math.gcd(heads, _MOST_GROUPS)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads and sets generators
def drop_by_groups(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, p: float, *, groups: int, n_head: int, first_head: int = 0
) -> Tensor:
    """Run an attention kernel with dropout, once per group of heads.

    The streams are seeded from one draw of the CPU's generator, and the device's generator goes on from that draw as
    well: after the call it stands where it would stand had this device held other heads. Nothing waits for the device.

    Args:
        kernel: ``kernel(q, k, v, heads, p)`` of some of the heads; ``heads`` is where they stand among all.
        q: (B, H, T, K), H of this device's heads, whole groups.
        k: (B, G, T, K), with as many heads per group, or fewer that divide evenly.
        v: As ``k``.
        p: Probability of dropping a weight, > 0.
        groups: Of the heads on all devices together.
        n_head: Heads on all devices together.
        first_head: Index among them of the first one here.

    Returns:
        (B, H, T, K).

    Raises:
        ValueError: when a group is not whole on this device. A recipe that has dropout from the start is refused before
            (see ``tensor_parallel_problems``); an override may turn it on in mid-run.
    """
    size = n_head // groups
    if q.shape[1] % size:
        raise ValueError(
            f"dropout={p}: attention draws it for {groups} groups of {size} heads, and this device holds"
            f" {q.shape[1]} heads; take a mesh.tensor_parallel that divides {groups}, or no attention dropout."
        )
    calls = q.shape[1] // size
    generator = _generator(q.device)
    seed = int(torch.randint(1 << 62, ()))
    outputs = []
    parts = zip(q.chunk(calls, dim=1), k.chunk(calls, dim=1), v.chunk(calls, dim=1), strict=True)
    for first, part in zip(range(first_head, first_head + q.shape[1], size), parts, strict=True):
        generator.manual_seed(mix(seed, first) >> 1)
        outputs.append(kernel(*part, slice(first, first + size), p))
    generator.manual_seed(mix(seed, n_head) >> 1)
    return torch.cat(outputs, dim=1)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
