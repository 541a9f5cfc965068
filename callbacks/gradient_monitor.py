"""Where in the model the gradient norm comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .grad_norm import GradNorm
from .monitor import Monitor
from .parameter_sums import Grouping, ParameterSums, named_trainable
from .private_optimizer_names import loss_scale, unscales_in_step
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GradientMonitor(Monitor):
    """Log the gradient norm per layer and per component, and the embedding's share of it.

    Before clipping, unscaled, over the whole accumulation window, as ``GradNorm`` (which it installs) takes the global
    one. A layer is what stands under one number in the parameters' names; a component is one kind of parameter in all
    layers. A parameter without a gradient counts as zero. One collective per measurement where parameters are sharded,
    none where every rank holds them whole.

    Why: GLM-130B found that the embedding's gradient led its collapses (Zeng et al. 2022, arXiv:2210.02414, section
    2.3), and that of the first layers rises before the rest.

    Logged: ``stability/grad_norm_layer/NAME``, ``stability/grad_norm_component/NAME``;
    ``stability/embedding_grad_share``: norm of the gradients of all ``nn.Embedding`` weights over the global norm, 0
    to 1 (a tied head counts as the embedding that it is). Where there is a gradient scaler also ``loss_scale``, under
    the same prefix: what it multiplied the loss by.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        per_tensor: Also per parameter, ``grad_norm_tensor/NAME``.

    Example::

        >>> Trainer(callbacks=[GradientMonitor()], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, per_tensor: bool = False) -> None:
        super().__init__(every_steps)
        self.per_tensor = per_tensor
        self._sums: ParameterSums | None = None
        self._groups: Grouping | None = None
        self._keys: list[str] = []
        self._embeddings: torch.Tensor | None = None  # indices of the tables among the parameters

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            GradNorm.of(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sums = ParameterSums.of(trainer, named_trainable(pl_module, trainer))
        self._groups = Grouping(self._sums, self.per_tensor)
        self._keys = [f"stability/grad_norm{label}" for label in self._groups.labels if label]
        tables = {m.weight for m in pl_module.modules() if isinstance(m, nn.Embedding)}
        places = [index for index, parameter in enumerate(self._sums.parameters) if parameter in tables]
        self._embeddings = torch.tensor(places, dtype=torch.long, device=self._sums.device)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # The gradients of the first optimizer's step where it takes part, whoever else has stepped before it.
        if self._sums is None or not (
            self.begins(trainer) or (self.is_due(trainer) and optimizer is trainer.optimizers[0])
        ):
            return
        assert self._groups is not None
        assert self._embeddings is not None
        with torch.no_grad():
            (squares,) = self._sums.total(self._sums.squares([p.grad for p in self._sums.parameters]))
            norms = self._groups.add_up(squares).sqrt()
            share = (squares[self._embeddings].sum() / squares.sum().clamp_min(1e-300)).sqrt()
            scale = loss_scale(trainer)
            if scale is not None and unscales_in_step(optimizer):  # the gradients are still multiplied by it
                norms = norms / scale
        scalars = Scalars.of(trainer)
        scalars.add(self._keys, norms[:-1])  # the last is the whole, which GradNorm logs
        scalars.add(["stability/embedding_grad_share"], share)
        if scale is not None:
            scalars.add(["stability/loss_scale"], scale)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._sums = self._groups = self._embeddings = None
