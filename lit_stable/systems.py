"""The kinds of model that a run may train, by the name that a recipe gives them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lit_stable.data.datamodule import TokenDataModule
from lit_stable.module import GPTModule

SystemName = Literal["gpt", "vlm"]
DEFAULT: SystemName = "gpt"


class System(NamedTuple):
    """A kind of model with its data."""

    module: type[GPTModule]
    data: type[TokenDataModule]


def system(name: str) -> System:
    """The system of a name; one that there is not is taken for a GPT, and refused by the parser."""
    if name == "vlm":
        from lit_stable.vlm.datamodule import PairDataModule
        from lit_stable.vlm.module import VLMModule

        return System(VLMModule, PairDataModule)
    return System(GPTModule, TokenDataModule)
