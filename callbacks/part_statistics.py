"""Numbers that are learned about each clipped part of a model, kept by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class PartStatistics(ABC):
    """A few numbers for each part, side by side in one tensor on the device of the norms: nothing waits for it.

    Saved by name, as plain lists: a run that is sharded in another way, or not at all, finds its own again. A name that
    was not saved begins with zeros, one that is no longer there is forgotten.

    Attributes:
        values: (rows, parts), fp32.
    """

    rows: ClassVar[int]

    def __init__(self) -> None:
        self._names: list[str] = []
        self.values = torch.zeros(self.rows, 0)

    def begin(self, names: Sequence[str], device: torch.device) -> None:
        """Lay out what is known for these parts, on this device. Waits for it, so not within a step."""
        known = self.state_dict()
        self._names = list(names)
        columns = [known.get(name, [0.0] * self.rows) for name in names]
        self.values = torch.tensor(columns, dtype=torch.float32, device=device).T.contiguous()

    @abstractmethod
    def judge(self, norms: Tensor, total: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Take the norms of a step in, and say what they may be.

        A norm that is 0 or not finite enters nothing: a tensor without a gradient (frozen, or not reached) has no norm
        to learn from, and one that was learned to be 0 could never be passed again.

        Args:
            norms: (parts,), fp32, on the device of the values.
            total: 0-d, the norm of all parts together.
            accepted: 0-d bool, whether the step will be taken; otherwise nothing enters.

        Returns:
            Two (parts,) tensors: the largest value that each norm may keep (infinite if it is no outlier), and the
            level above which it would have been one (infinite while the statistics warm up).
        """

    def _take_in(self, new: Tensor, norms: Tensor, accepted: Tensor) -> None:
        self.values = torch.where(accepted & torch.isfinite(norms) & (norms > 0), new, self.values)

    def state_dict(self) -> dict[str, list[float]]:
        """The numbers of each part by its name. Waits for the device."""
        return dict(zip(self._names, self.values.T.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore on the CPU, until :meth:`begin` says which parts there are."""
        self._names = list(state)
        self.values = torch.tensor(list(state.values()), dtype=torch.float32).reshape(-1, self.rows).T
