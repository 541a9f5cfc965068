"""How large every module's output is, sample by sample, in the order in which modules finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor, nn

from lit_stable.callbacks.batch_tensors import tensors
from lit_stable.callbacks.shards import local
from lit_stable.callbacks.wrapper_names import unwrapped

#: Times the usual size above which an output surges.
SURGE = 10.0


@dataclass(frozen=True)
class Outlier:
    """The first module whose output is out of the ordinary."""

    module: str
    sample: int
    """Stream index."""
    value: float
    """Largest absolute element of the output for that sample."""
    usual: float
    """Median of the same over samples."""

    def sentence(self) -> str:
        """For people."""
        where = f"{self.module}, sample {self.sample}"
        if not self.value < float("inf"):
            return f"first output that is not finite: {where}"
        return f"first output that surges: {where}: {self.value:.4g}, {self.value / self.usual:.3g} times the usual"


class ModuleOutputs:
    """Watches the modules of a network during forward passes; what a backward pass recomputes is not seen twice."""

    def __init__(self, network: nn.Module) -> None:
        self.seen: dict[str, dict[int, float]] = {}  # by module in order of finishing: by sample the largest element
        self._samples: Sequence[int] | None = None
        names = [(name, module) for name, module in network.named_modules() if name]
        self._handles = [module.register_forward_hook(self._hook(unwrapped(name))) for name, module in names]

    def begin(self, samples: Sequence[int]) -> None:
        """A forward pass over samples of these stream indices follows."""
        self._samples = samples

    def end(self) -> None:
        """The forward pass is over."""
        self._samples = None

    def remove(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def seen(module: nn.Module, args: Any, output: Any) -> None:
            if self._samples is None:
                return
            for tensor in tensors(output):
                if tensor.is_floating_point():
                    self._note(name, self._samples, local(tensor.detach()))

        return seen

    def _note(self, name: str, samples: Sequence[int], output: Tensor) -> None:
        if not output.numel():
            return
        each = (
            output.abs().flatten(1).amax(1) if output.ndim > 1 and len(output) == len(samples) else output.abs().max()
        )
        values = each.float().expand(len(samples)).tolist()
        found = self.seen.setdefault(name, {})
        for sample, value in zip(samples, values, strict=True):
            found[sample] = max(found.get(sample, 0.0), value) if value == value else value


def first_outlier(seen: Mapping[str, Mapping[int, float]], before: Mapping[str, Mapping[int, float]]) -> Outlier | None:
    """The first module with an output that is not finite, else the first with one that surges, else ``None``.

    Args:
        seen: Of the step, as :class:`ModuleOutputs` has it.
        before: Of the step before, where it was replayed: what is usual. Else the step's own median is.
    """
    surging = None
    for module, values in seen.items():
        usual = _usual(before.get(module, values))
        for sample, value in values.items():
            if not value < float("inf"):
                return Outlier(module, sample, value, usual)
            if surging is None and usual > 0 and value > SURGE * usual:
                surging = Outlier(module, sample, value, usual)
    return surging


def _usual(values: Mapping[int, float]) -> float:
    finite = [value for value in values.values() if value < float("inf")]
    return median(finite) if finite else 0.0


def merged(parts: Sequence[Mapping[str, Mapping[int, float]]]) -> dict[str, dict[int, float]]:
    """What several ranks have seen, in the order of the first."""
    whole: dict[str, dict[int, float]] = {}
    for part in parts:
        for module, values in part.items():
            whole.setdefault(module, {}).update(values)
    return whole
