"""What Adam remembers: its moments, and whether its gradients are still above eps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .base import MisconfigurationException
from .monitor import Monitor
from .parameter_sums import Grouping, ParameterSums, named_trainable
from .scalars import Scalars
from .shards import local

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

FIRST, SECOND = "exp_avg", "exp_avg_sq"


class OptimizerMonitor(Monitor):
    """Log the moments of Adam or AdamW, per layer and per component, after the step.

    With v the second moment and v^ = v / (1 - beta2^t) it without the bias of the first steps, the root of the mean of
    v^ is the gradient's root mean square as Adam sees it. An update is m^ / (sqrt(v^) + eps): where gradients come down
    to eps, updates shrink and training silently stalls there, as Wortsman et al. 2023 (arXiv:2309.14322, section 3.4)
    found for the embeddings of larger models with eps 1e-8.

    One collective per measurement where parameters are sharded, none where every rank holds them whole.

    Logged, of the whole and per layer and component: root mean square of m^, ``stability/adam_first_moment``,
    ``stability/adam_first_moment_layer/NAME``, ``stability/adam_first_moment_component/NAME``; root of the mean of v^,
    ``stability/adam_grad_rms``, ``stability/adam_grad_rms_layer/NAME``, ``stability/adam_grad_rms_component/NAME``;
    that divided by eps, ``stability/adam_grad_rms_over_eps``, ``stability/adam_grad_rms_over_eps_layer/NAME``,
    ``stability/adam_grad_rms_over_eps_component/NAME``; share of elements whose sqrt(v^) is below eps, 0 to 1,
    ``stability/adam_below_eps``, ``stability/adam_below_eps_layer/NAME``, ``stability/adam_below_eps_component/NAME``.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        per_tensor: Also with ``_tensor/NAME`` behind the name.

    Raises:
        MisconfigurationException: when the first optimizer keeps no ``exp_avg`` and ``exp_avg_sq`` as floating-point
            tensors, so is no Adam, or an 8-bit one.

    Example::

        >>> Trainer(callbacks=[OptimizerMonitor(every_steps=100)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, per_tensor: bool = False) -> None:
        super().__init__(every_steps)
        self.per_tensor = per_tensor
        self._sums: ParameterSums | None = None
        self._groups: Grouping | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(not {"betas", "eps"} <= group.keys() for group in trainer.optimizers[0].param_groups):
            raise _no_adam(trainer.optimizers[0])
        first = {p for group in trainer.optimizers[0].param_groups for p in group["params"]}
        parameters = {n: p for n, p in named_trainable(pl_module, trainer).items() if p in first}
        for parameter in parameters.values():
            _state(trainer.optimizers[0], parameter)  # refused here where it can be: 8-bit states exist by now
        self._sums = ParameterSums.of(trainer, parameters)
        self._groups = Grouping(self._sums, self.per_tensor)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._sums is None or self._groups is None or not self.has_ended(trainer):
            return
        with torch.no_grad():
            columns = self._sums.total(*self._measure(trainer.optimizers[0], self._sums))
            first, second, relative, below = map(self._groups.add_up, columns)
        sizes, labels = self._groups.sizes, self._groups.labels
        scalars = Scalars.of(trainer)
        for name, values in (
            ("adam_first_moment", (first / sizes).sqrt()),
            ("adam_grad_rms", (second / sizes).sqrt()),
            ("adam_grad_rms_over_eps", (relative / sizes).sqrt()),
            ("adam_below_eps", below / sizes),
        ):
            scalars.add([f"stability/{name}{label}" for label in labels], values)

    def _measure(self, optimizer: Any, sums: ParameterSums) -> list[Tensor]:
        """This rank's parts of: squares of m^, sum of v^, sum of v^ / eps^2, number below eps; each (n,) fp64."""
        device, groups = sums.device, {p: group for group in optimizer.param_groups for p in group["params"]}
        options = [[*groups[p]["betas"], groups[p]["eps"]] for p in sums.parameters]
        beta1, beta2, eps = torch.tensor(options, dtype=torch.float64).to(device).unbind(1)
        states = [_state(optimizer, p) for p in sums.parameters]
        counts = [torch.as_tensor(s.get("step", 1)) for s in states]
        # Where every count lies on the host, as without ``fused``, they cross to the device together.
        lie_on = device if any(count.device == device for count in counts) else torch.device("cpu")
        steps = torch.stack([count.to(lie_on) for count in counts]).to(device, torch.float64)
        steps = steps.clamp(min=1)  # moments that no step has entered are 0, not 0/0
        unbiased1, unbiased2 = 1 - beta1**steps, 1 - beta2**steps
        first = sums.squares([s.get(FIRST) for s in states]) / unbiased1.square()
        moments = [local(s[SECOND]) if s else None for s in states]
        second = sums.stack([None if v is None else v.sum(dtype=torch.float32) for v in moments]) / unbiased2
        limits = (eps.square() * unbiased2).to(torch.float32).unbind()
        few = [None if v is None else (v < limit).sum() for v, limit in zip(moments, limits, strict=True)]
        return [first, second, second / eps.square(), sums.stack(few)]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._sums = self._groups = None


def _state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Any]:
    """The state of a parameter; empty where it never had a gradient."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    moments = [state.get(name) for name in (FIRST, SECOND)]
    if state and not all(isinstance(m, Tensor) and m.is_floating_point() for m in moments):
        raise _no_adam(optimizer)
    return state


def _no_adam(optimizer: Any) -> MisconfigurationException:
    return MisconfigurationException(
        f"`OptimizerMonitor`: {type(optimizer).__name__} keeps no {FIRST} and {SECOND} in floating point, so there is"
        " nothing to read; take it out, or train with torch's Adam or AdamW."
    )
