"""lit-stable: a PyTorch Lightning trainer that keeps language-model runs stable.

Importing the package costs nothing: torch and Lightning are imported with the first public name that needs them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_stable.data.datamodule import TokenDataModule
    from lit_stable.model.config import GPTConfig
    from lit_stable.module import GPTModule
    from lit_stable.optim.schedule import LRSchedule

__all__ = ["GPTConfig", "GPTModule", "LRSchedule", "TokenDataModule", "__version__"]

_HOMES = {
    "GPTConfig": "lit_stable.model.config",
    "GPTModule": "lit_stable.module",
    "LRSchedule": "lit_stable.optim.schedule",
    "TokenDataModule": "lit_stable.data.datamodule",
}

try:
    __version__ = version("lit-stable")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0+checkout"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
