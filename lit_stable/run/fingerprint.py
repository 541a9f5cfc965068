"""What a run ran on and with: versions, hardware, commits, settings, the recipe as a hash; and what has changed of it.

Runs that differ in nothing but the version of a library, or the kind of a GPU, have diverged where the other did not.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import yaml

from lit_stable.environment import git_commit, versions

#: Variables that change which kernels and collectives run.
_SETTINGS = ("CUBLAS_", "CUDNN_", "CUDA_LAUNCH", "NCCL_", "NVIDIA_TF32_", "PYTORCH_", "TORCH_")
_NOT_THE_RUN = ("run", "checkpoints", "resume", "ckpt_path", "config")
_RECIPE, _FEW = "recipe", 20


def fingerprint(recipe: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Plain data, so that it goes into a checkpoint and a YAML file.

    Args:
        recipe: The resolved recipe.
        ranks: Processes of the run.
    """
    return {
        _RECIPE: recipe_hash(recipe),
        **versions(),
        "project": _project(Path.cwd()),
        "CPU": _cpu(),
        "threads": torch.get_num_threads(),  # and not OMP_NUM_THREADS, which Lightning sets under some strategies
        "ranks": ranks,
        **_cuda(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        "packages": dict(_packages()),
    }


@functools.cache  # of hundreds of packages it takes longer than all else, and what is imported stays what it is
def _packages() -> tuple[tuple[str, str], ...]:
    """Name and version of all that is installed; each look at a package's metadata reads them anew."""
    every = [distribution.metadata for distribution in distributions()]
    return tuple(sorted((one["Name"], one["Version"]) for one in every if one["Name"]))


def recipe_hash(recipe: Mapping[str, Any]) -> str:
    """The first 16 digits of the SHA-256 of a resolved recipe, whatever the run's name and place are."""
    kept = {key: value for key, value in recipe.items() if key not in _NOT_THE_RUN}
    return hashlib.sha256(yaml.safe_dump(kept, sort_keys=True).encode()).hexdigest()[:16]


def environment_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines ``name: old -> new`` for what differs, the recipe apart; of very many the first, and how many more."""
    before, after = _flat(old), _flat(new)
    names = [name for name in {**after, **before} if name != _RECIPE and before.get(name) != after.get(name)]
    lines = [f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names]
    more = [f"and {len(lines) - _FEW} more; compare the files environment-*.yaml"] if len(lines) > _FEW else []
    return lines[:_FEW] + more


def _flat(node: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in node.items():
        flat.update({f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def _project(folder: Path) -> str:
    """The commit of the repository that the run was started in."""
    top = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
    return (git_commit(top) if top is not None else None) or "no repository"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cuda() -> dict[str, str]:
    """Versions that only a machine with GPUs has."""
    if not torch.cuda.is_available():
        return {}
    found = {"cuDNN": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    if torch.distributed.is_nccl_available():
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL"] = ".".join(map(str, nccl))
    driver = Path("/proc/driver/nvidia/version")
    return {**found, "driver": driver.read_text().splitlines()[0].strip()} if driver.is_file() else found
