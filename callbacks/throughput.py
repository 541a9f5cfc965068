"""How fast a run is, and how much of its cards it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .base import rank_zero_info, refuse_all
from .interval_clock import IntervalClock
from .monitor import Monitor
from .parameter_sums import ParameterSums
from .peak_flops import peak_flops
from .progress import Progress
from .rank_gather import gather_ranks
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Throughput(Monitor):
    """Log tokens per second and the model FLOPs utilisation, over the steps since the last measurement.

    Only time spent training counts: validations are left out, checkpoints are not. The slowest rank's time is taken. On
    a measured step the host waits for the device, so that the time is that of work done.

    MFU (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) is the rate of useful operations over the peak of the
    cards: ``flops_per_token`` x tokens per second / (ranks x ``peak_flops``). What activation checkpointing computes
    again is no useful operation.

    Logged: ``stability/tokens_per_second`` (all ranks together), ``stability/tokens_per_second_per_device``, and, where
    a peak is known, ``stability/mfu``, 0 to 1.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        flops_per_token: Operations of training on one token, forward and backward, > 0; ``None``: what
            ``flops_per_token(length)`` of the LightningModule says for the mean length of the samples, if it has that
            method, else six times the number of trained parameters outside of embedding tables.
        peak_flops: Operations per second of one device, > 0; ``None``: by the card's name and the precision, from the
            table in ``peak_flops.py``. For a card that is not in it no MFU is logged, which is said at the start.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when a number is not above 0.

    Example::

        >>> Trainer(callbacks=[Throughput(peak_flops=989.4e12)], logger=False)  # doctest: +SKIP
    """

    def __init__(
        self, every_steps: int | None = None, flops_per_token: float | None = None, peak_flops: float | None = None
    ) -> None:
        super().__init__(every_steps)
        refuse_all(
            f"`Throughput({name}={value})`: must be above 0."
            for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops))
            if value is not None and not value > 0
        )
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._peak: float | None = None
        self._weights = 0
        self._clock = IntervalClock()
        self._tokens = self._samples = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Progress.of(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._weights = int(ParameterSums.of(trainer, multiplied(pl_module)).sizes.sum())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = Progress.of(trainer)
        device = trainer.strategy.root_device
        self._peak = self.peak_flops
        if self._peak is None and device.type == "cuda":
            card = torch.cuda.get_device_name(device)
            self._peak = peak_flops(card, str(trainer.precision_plugin.precision))
            if self._peak is None:
                rank_zero_info(f"Throughput: the peak of {card!r} is not known, so no MFU is logged; give peak_flops.")
        self._tokens, self._samples = progress.tokens, progress.samples
        self._clock.start(progress.tokens)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.go_on()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        progress = Progress.of(trainer)
        if not self.has_ended(trainer):
            return
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._clock.interval(progress.tokens)
        seconds = float(gather_ranks(torch.tensor([self._clock.seconds], device=device, dtype=torch.float64)).max())
        tokens, samples = progress.tokens - self._tokens, progress.samples - self._samples
        self._tokens, self._samples = progress.tokens, progress.samples
        rate = tokens / seconds
        scalars, ranks = Scalars.of(trainer), trainer.world_size
        scalars.add(["stability/tokens_per_second", "stability/tokens_per_second_per_device"], [rate, rate / ranks])
        if self._peak is not None:
            flops = self._flops_per_token(pl_module, tokens / max(samples, 1))
            scalars.add(["stability/mfu"], [flops * rate / (ranks * self._peak)])

    def _flops_per_token(self, module: LightningModule, length: float) -> float:
        if self.flops_per_token is not None:
            return self.flops_per_token
        own = getattr(module, "flops_per_token", None)
        return float(own(round(length))) if own is not None else 6.0 * self._weights


def multiplied(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained parameters that something is multiplied by: all but embedding tables, unless tied to a head."""
    others = [m for m in module.modules() if not isinstance(m, torch.nn.Embedding)]
    kept = {p for m in others for p in m.parameters(recurse=False) if p.requires_grad}
    return {name: p for name, p in module.named_parameters() if p in kept}
