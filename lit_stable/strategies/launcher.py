"""Devices and nodes as the launcher says, so that a recipe need not know how it is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def launched_devices(environ: Mapping[str, str] = os.environ) -> dict[str, int] | None:
    """``{"devices": ..., "num_nodes": ...}`` under torchrun, else ``None``.

    ``devices: auto`` counts CPU cores or GPUs, which under torchrun must equal the processes per node: on a CPU it
    never does. The launcher's word is taken instead.
    """
    if "LOCAL_WORLD_SIZE" not in environ or "WORLD_SIZE" not in environ or "TORCHELASTIC_RUN_ID" not in environ:
        return None
    local, world = int(environ["LOCAL_WORLD_SIZE"]), int(environ["WORLD_SIZE"])
    return {"devices": local, "num_nodes": max(1, world // local)}


def describe_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Who started this process, for the first lines of a run."""
    if launched_devices(environ) is not None:
        return "torchrun"
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ:
        return "SLURM"
    return "this command"


def lends_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent lends the ranks its own store, as it does unless told not to."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_advice(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What to set before a launcher starts ranks again, where it would and that is not set; one line or none.

    The agent lends its own store to every start. Seen with torch 2.13: gloo, over which ranks agree on GPUs too, looks
    for the addresses of ranks that are gone.
    """
    if not lends_store(environ) or int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) < 1:
        return []
    return [
        "torchrun --max-restarts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or a second start may wait for ever for"
        " ranks of the first."
    ]


def recipe_devices(trainer: Mapping[str, Any]) -> int:
    """How many devices the options of a Trainer name over all nodes; 1 where they leave it to the machine.

    Example::

        >>> recipe_devices({"devices": 8, "num_nodes": 64}), recipe_devices({"devices": "auto", "num_nodes": 2})
        (512, 1)
    """
    devices = trainer["devices"]
    if isinstance(devices, list):
        devices = len(devices)
    return devices * int(trainer["num_nodes"]) if isinstance(devices, int) and devices > 0 else 1
