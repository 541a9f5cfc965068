"""What a bug report has to say about the machine."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lit_stable import __version__

_PACKAGE = Path(__file__).resolve().parent
_PACKAGES = ("lightning", "torchmetrics", "jsonargparse", "bitsandbytes", "tokenizers")


def version_block() -> str:
    """Versions and hardware, one a line, to paste into a bug report.

    Versions come from package metadata; only torch is imported, to ask which CUDA it was built for and which GPUs it
    sees. A package that is not installed is listed as such.
    """
    rows = versions()
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def versions() -> dict[str, str]:
    """The rows of :func:`version_block`."""
    rows = {"lit-stable": _own_version(), "Python": platform.python_version(), "torch": _torch()}
    rows |= {package: _installed(package) for package in _PACKAGES}
    return {**rows, "OS": platform.platform(), "CPUs": str(os.cpu_count()), "GPUs": _gpus()}


@functools.cache
def code_digest(package: Path = _PACKAGE) -> str:
    """The first 12 digits of the SHA-256 over the package's own source: what no version and no commit may tell."""
    found = {file.relative_to(package): file for file in package.rglob("*.py")}
    callbacks = (package / "callbacks").resolve()  # a link in a checkout, which a search does not follow
    found |= {Path("callbacks", file.relative_to(callbacks)): file for file in callbacks.rglob("*.py")}
    sha256 = hashlib.sha256()
    for name in sorted(found):
        sha256.update(f"{name.as_posix()}\0".encode() + hashlib.sha256(found[name].read_bytes()).digest())
    return sha256.hexdigest()[:12]


def frameworks() -> dict[str, str]:
    """What a run is made of, of the rows of :func:`version_block`."""
    return {"torch": _torch(), "lightning": _installed("lightning")}


def _own_version() -> str:
    commit = git_commit(_PACKAGE.parent)
    return f"{__version__} (commit {commit})" if commit else __version__


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _torch() -> str:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load, the very bug reported
        return f"{_installed('torch')} (cannot be imported: {error})"
    cuda = torch.version.cuda
    return f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'no CUDA'})"


def _gpus() -> str:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return "unknown"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or "none"


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout whose top is ``folder``, ``-dirty`` behind it where files differ; None: it is none."""
    if not (folder / ".git").exists():  # site-packages may lie inside somebody else's repository
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git on this machine, or no commit yet
        return None
    return done.stdout.strip()
