"""The factor that keeps fp16 gradients in range: the policy by which it moves, and a scaler on which ranks agree."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.device_step import local_gradients


@judges_arguments(ValueError, "loss_scale")
@dataclass(frozen=True)
class LossScale:
    """How the loss scale moves (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2); read with fp16 only.

    It doubles after ``window`` steps in a row without overflow, and halves at an overflow once ``hysteresis`` of them
    were met since it last doubled (Megatron-LM). OPT-175B: {init: 4, window: 256, floor: 0.03125}; BLOOM's 104B
    predecessor: {init: 4096, window: 500, hysteresis: 2}.
    """

    init: float = 65536.0
    """Scale of the first step, at least the floor."""

    window: int = 2000
    """Steps in a row without overflow after which it doubles, >= 1."""

    hysteresis: int = 1
    """Overflows that it takes to halve it, >= 1; each of them skips its step."""

    floor: float = 1.0
    """Lowest scale, > 0. An overflow that would halve it further ends the run: no scale would help such gradients."""

    threshold: float | None = None
    """A lowest scale that ends no run, at least the floor: steps that overflow there are skipped, as long as they do
    (metaseq, 0.25). ``None``: there is the floor alone."""

    @property
    def lowest(self) -> float:
        """What the scale never goes below."""
        return self.floor if self.threshold is None else self.threshold

    def __post_init__(self) -> None:
        problems = [
            f"loss_scale.{name}={value}: must be at least 1."
            for name, value in (("window", self.window), ("hysteresis", self.hysteresis))
            if value < 1
        ]
        if not 0 < self.floor < math.inf:  # written so that NaN fails too
            problems.append(f"loss_scale.floor={self.floor}: must be a finite number above 0.")
        elif not self.floor <= self.init < math.inf:
            problems.append(f"loss_scale.init={self.init}: must be finite and at least loss_scale.floor={self.floor}.")
        elif self.threshold is not None and not self.floor <= self.threshold <= self.init:
            problems.append(
                f"loss_scale.threshold={self.threshold}: must lie between loss_scale.floor={self.floor} and"
                f" loss_scale.init={self.init}, or be null."
            )
        if problems:
            raise ValueError("\n".join(problems))


DEFAULT = LossScale()
"""As torch has it, and with an end at 1."""


class LossScaler(torch.amp.GradScaler):
    """torch's gradient scaler with the policy of :class:`LossScale`, decided on the device without a host sync.

    Whether gradients overflowed is found on each rank's own pieces of them. ``over_ranks`` makes it the finding of any
    rank: sharding and tensor parallelism give every rank other pieces, and a step that some ranks skip would split
    the run. (torch's scaler for FSDP1 does not agree when the optimizer is fused.)

    Saved and restored: the scale, the steps since it last moved, the overflows since it last doubled. The policy comes
    from the recipe. A state of torch's own scaler loads.

    Args:
        policy: How the scale moves.
        device: ``cuda`` or ``cpu``.
        over_ranks: Whether all ranks take the finding of any rank for theirs.

    Attributes:
        exhausted: 0-d bool tensor on the device: an overflow wanted a scale below the floor. ``None`` before the first
            step.
    """

    def __init__(self, policy: LossScale = DEFAULT, device: str = "cuda", over_ranks: bool = False) -> None:
        super().__init__(device, init_scale=policy.init, growth_interval=policy.window)
        self.policy = policy
        self.over_ranks = over_ranks
        self.exhausted: Tensor | None = None
        self._hits_left: int | Tensor = policy.hysteresis  # overflows until it halves

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, device: str) -> LossScaler:
        """One that begins as torch's scaler would, and agrees over ranks; one of ours stays what it is."""
        if isinstance(scaler, cls):
            scaler.over_ranks = True
            return scaler
        if not scaler.is_enabled():  # there is no CUDA: torch says so
            return cls(DEFAULT, device, over_ranks=True)
        init, window = scaler.get_scale(), scaler.get_growth_interval()
        return cls(LossScale(init=init, window=window, floor=min(1.0, init)), device, over_ranks=True)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hits_left = torch.full((), int(self._hits_left), dtype=torch.int32, device=dev)
        self.exhausted = torch.zeros((), dtype=torch.bool, device=dev)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what this step's gradients were; ``new_scale`` sets it instead, as in torch."""
        if self._enabled and new_scale is None:
            found = [f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()]
            new_scale = self._moved(torch.stack(found).sum() > 0)
        super().update(new_scale)

    def _moved(self, overflow: Tensor) -> Tensor:
        scale, good_steps = self._scale, self._growth_tracker
        assert scale is not None
        assert good_steps is not None
        assert isinstance(self._hits_left, Tensor)
        hits_left = self._hits_left - overflow.int()
        halve = overflow & (hits_left <= 0)
        good_steps = torch.where(overflow, 0, good_steps + 1)
        double = good_steps >= self.policy.window
        assert self.exhausted is not None
        if self.policy.threshold is None:
            self.exhausted = self.exhausted | (halve & (scale <= self.policy.floor))
        self._hits_left = torch.where(double, self.policy.hysteresis, hits_left)
        self._growth_tracker = torch.where(double, 0, good_steps).to(torch.int32)
        doubled = torch.where(torch.isfinite(2 * scale), 2 * scale, scale)
        halved = (scale / 2).clamp(min=self.policy.lowest)
        return torch.where(halve, halved, torch.where(double, doubled, scale))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch's own takes no mix of plain tensors and DTensors, and asks other ranks for DTensors only.
        by_dtype = defaultdict(list)
        for gradient in local_gradients(optimizer):
            if gradient.numel():  # a rank may hold an empty shard
                by_dtype[gradient.dtype].append(gradient)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        if self.over_ranks and dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    def state_dict(self) -> dict[str, Any]:
        """torch's state and the count of the hysteresis, as plain numbers. Waits for the device."""
        return {**super().state_dict(), "hits_left": int(self._hits_left)} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scale, no lower than today's lowest, and the counts; the policy stays."""
        if not self._enabled:
            return
        scale = max(float(state_dict["scale"]), self.policy.lowest)
        kept = {
            "scale": scale,
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }
        super().load_state_dict({**state_dict, **kept})
        hits_left = min(int(state_dict.get("hits_left", self.policy.hysteresis)), self.policy.hysteresis)
        if isinstance(self._hits_left, Tensor):
            self._hits_left = torch.full_like(self._hits_left, hits_left)
            self.exhausted = torch.zeros_like(self.exhausted) if self.exhausted is not None else None
        else:
            self._hits_left = hits_left
