"""What a run, its report and `check` ask of the model that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import flops_per_token, parameter_breakdown
from lit_stable.model.gpt import GPT


class ModelFacts(LightningModule):
    """A LightningModule around a GPT, of which others ask; whoever trains more than the GPT answers otherwise.

    Args:
        config: The GPT.

    Attributes:
        initial_weights: Checkpoint of the whole network that its weights come from; ``None``: as ``begun_with`` says.
        runs: Folder in which other runs are found by their name.
        is_continued: Whether a whole checkpoint will be loaded, so that nothing else needs to be.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.initial_weights: Path | None = None
        self.runs = Path("runs")
        self.is_continued = False

    def outline(self) -> nn.Module:
        """The network by the names that it has in a fit, without memory; call it under the meta device."""
        return nn.ModuleDict({"gpt": GPT(self.config)})

    def optimized(self, parts: Any) -> nn.Module:
        """Of a module that is built, or its outline: what the optimizer's patterns name the parameters of."""
        gpt: nn.Module = parts.gpt
        return gpt

    def describe(self) -> str:
        """All options of the network in a line."""
        return str(self.config)

    def parameter_parts(self, parts: Any) -> dict[str, int]:
        """Parameters of a module that is built, or its outline, by what they are of."""
        return parameter_breakdown(self.config)

    def meeting_problems(self, data: Any) -> list[str]:
        """What keeps the model from training on these data, beside vocabulary and length."""
        return []

    @property
    def begun_with(self) -> Path | None:
        """The checkpoint that the GPT's weights come from; ``None``: they follow from ``seed_init``."""
        return self.initial_weights

    def flops_per_token(self, length: int) -> int:
        """Operations of training on one token in sequences of ``length``, for ``Throughput``."""
        return flops_per_token(self.config, length)
