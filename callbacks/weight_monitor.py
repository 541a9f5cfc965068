"""The size of every weight, and of the gains of norms, which decay or drift away from 1 long before the loss tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .module_patterns import import_types, norm_parameter_names
from .monitor import Monitor
from .parameter_sums import ParameterSums
from .scalars import Scalars
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class WeightMonitor(Monitor):
    """Log the root mean square of every parameter, as the weights are before the step.

    That is the L2 norm divided by the root of the number of elements, the scale in which the BloombergGPT team compared
    the components of their model (Wu et al. 2023, arXiv:2303.17564, training chronicles: the norm of a gain gamma times
    1/sqrt(D)). So a gain series starts at 1, a linear weight's at the standard deviation of its initialisation,
    and what leaves that place tells which component: in their first run the input norm of the first layer shrank for
    twelve thousand steps, by a weight decay that should not have been there, before the gradient norm rose.

    Frozen parameters are logged too. One collective per measurement where parameters are sharded, none where every
    rank holds them whole.

    Logged: ``stability/weight_rms/NAME`` per parameter, and ``stability/norm_gain/NAME`` per gain of a
    norm layer (its biases are weights); NAME is the parameter's name, without what wrappers add to it.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        norm_types: Import paths of further classes that are norms, besides those named ``...LayerNorm`` or
            ``...RMSNorm`` and what derives from them.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when a class cannot be imported.

    Example::

        >>> Trainer(callbacks=[WeightMonitor()], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, norm_types: list[str] | None = None) -> None:
        super().__init__(every_steps)
        self.norm_types = import_types(norm_types or [])
        self._sums: ParameterSums | None = None
        self._keys: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = {unwrapped(name): p for name, p in pl_module.named_parameters()}
        self._sums = ParameterSums.of(trainer, parameters)
        gains = {n for n in norm_parameter_names(pl_module, self.norm_types) if not n.endswith("bias")}
        self._keys = [f"stability/{'norm_gain' if name in gains else 'weight_rms'}/{name}" for name in parameters]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._sums is None or not self.begins(trainer):
            return
        with torch.no_grad():
            (squares,) = self._sums.total(self._sums.squares(self._sums.parameters))
            Scalars.of(trainer).add(self._keys, (squares / self._sums.sizes).sqrt())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._sums = None
