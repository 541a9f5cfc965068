"""Ranks that make many fits lay themselves out once for each shape: whoever asks for a mesh again is given the first.

Nobody takes down the groups of a mesh, and the threads of each wake a hundred times a second: fits of one launch would
slow down with their number. A process of its own, as a run is, makes one mesh.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh

import lit_stable.strategies.mesh

_make = device_mesh.init_device_mesh
_made: dict[Any, device_mesh.DeviceMesh] = {}


def _kept(device_type: str, mesh_shape: tuple[int, ...], **options: Any) -> device_mesh.DeviceMesh:
    if not dist.is_initialized():
        return _make(device_type, mesh_shape, **options)
    key = (dist.group.WORLD, device_type, tuple(mesh_shape), *sorted(options.items()))
    if key not in _made:
        _made[key] = _make(device_type, mesh_shape, **options)
    return _made[key]


def install() -> None:
    """For Lightning, which imports it where it calls it, and for our own."""
    device_mesh.init_device_mesh = lit_stable.strategies.mesh.init_device_mesh = _kept
