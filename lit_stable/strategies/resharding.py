"""What both kinds of FSDP leave gathered after an evaluation is freed."""

from __future__ import annotations

from torch import nn

from lit_stable.callbacks.extra_forward import reshard


class ReshardsAfterEvaluation:
    """For strategies under which the root stays gathered after a forward pass, for a backward pass.

    An evaluation never runs one: until the next training step the module's parameters would not be those that the
    optimizer holds, and weights that a rewind loads would not reach the next forward pass.
    """

    model: nn.Module | None

    def on_validation_end(self) -> None:
        self._reshard()

    def on_test_end(self) -> None:
        self._reshard()

    def _reshard(self) -> None:
        assert self.model is not None
        reshard(self.model)
