"""Another dropout rate for a while, in every dropout module of a model."""

from __future__ import annotations

from torch import nn

from .base import MisconfigurationException

_TYPES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class DropoutRate:
    """Sets ``p`` of all dropout modules, found by type, and puts it back.

    An attention kernel that drops by itself takes part if its module reads the rate from an ``nn.Dropout`` that it
    holds. Evaluation is not touched: modules drop in train mode only.
    """

    def __init__(self, p: float) -> None:
        self.p = p
        self._own: list[tuple[nn.Module, float]] = []

    def find(self, model: nn.Module, who: str = "LROverride") -> None:
        """Remember every dropout module and its rate.

        Raises:
            MisconfigurationException: when there is none.
        """
        self.restore()
        self._own = [(module, float(module.p)) for module in model.modules() if isinstance(module, _TYPES)]
        if not self._own:
            raise MisconfigurationException(
                f"`{who}(dropout={self.p})`: {type(model).__name__} holds no dropout module; build it with"
                " nn.Dropout, at rate 0 if need be."
            )

    @property
    def own(self) -> float:
        """The largest rate that the model was built with."""
        return max(rate for _, rate in self._own)

    def apply(self) -> None:
        for module, _ in self._own:
            module.p = self.p  # type: ignore[assignment]

    def restore(self) -> None:
        for module, rate in self._own:
            module.p = rate  # type: ignore[assignment]
        self._own = []
