"""The same work twice, bit for bit: a check against devices that compute wrong now and then and say nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .base import MisconfigurationException, rank_zero_info
from .batch_tensors import tensors
from .bit_hash import bit_hash
from .events import Event, Events, emit
from .extra_forward import reshard, undisturbed_generators
from .invariant_check import InvariantViolation
from .monitor import Monitor
from .network_calls import NetworkCalls
from .progress import Progress
from .rank_gather import gather_ranks
from .scalars import Scalars
from .shards import fsdp1_model, local
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: Times the largest difference seen among sound passes that another one must exceed where passes are never equal.
ABOVE_NOISE = 10.0
_FIRST_PASSES = 4  # of the first check, which learns whether passes are equal


class RepeatCheck(Monitor):
    """Run a micro-batch forward and backward twice, every so often, and compare outputs and gradients to the bit.

    A device that flips a bit once in a while makes no error, only a run that goes astray; most of what it computes is
    right when it is computed again (silent data corruption: Dixit et al. 2021, arXiv:2102.11245; in training, Llama 3,
    arXiv:2407.21783, section 3.3.4). So just before an optimizer step the calls of the network in its last micro-batch
    are made again, twice from the same state of the generators, with a backward pass from the mean square of the
    outputs. What a pass came to is one hash of bits and one norm for the outputs and for each gradient; they are
    compared on the device.

    The first check makes four passes. If they are equal, then from there on **one bit is an event**. If they are not
    (kernels that add up in any order; give ``Trainer(deterministic=True)``), that is said, and an event is a norm that
    differs by more than 10 times the largest difference seen among sound passes.

    The run is bit-identical to one without: gradients are set aside meanwhile, generators put back. Costs two more
    passes over a micro-batch per check, and memory for one more set of gradients. Under DDP nothing is communicated in
    it, and the rank whose device is at fault is named; under ``fsdp2`` gradients are summed over ranks before they can
    be compared, so a fault in the backward pass is told by all ranks that hold the sum.

    Event, the same on all ranks: ``silent_corruption``, with ranks, the first part that differs (``outputs`` or a
    parameter), the largest relative difference of a norm.

    Logged: ``stability/repeat_mismatches`` (parts that differed in the check, of all ranks; 0 if all is well).

    Args:
        every_steps: Optimizer steps between checks, rounded up to a multiple of ``log_every_n_steps``; ``None``: every
            logging step.
        on_violation: ``tell``, or ``raise``: the first event ends the run, on all ranks.

    Raises:
        MisconfigurationException: as :class:`Monitor`; under FSDP1, which keeps gradients of its own.
        InvariantViolation: see ``on_violation``.

    Example::

        >>> Trainer(callbacks=[RepeatCheck(every_steps=1000)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = 1000, on_violation: Literal["tell", "raise"] = "tell") -> None:
        super().__init__(every_steps)
        self.on_violation = on_violation
        self._calls = NetworkCalls()
        self._noise: float | None = None  # largest difference of a norm among sound passes; 0: passes are equal

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Events.of(trainer)
            Progress.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._noise = None  # of these devices: the next session may run on others
        if fsdp1_model(trainer) is not None:
            raise MisconfigurationException(
                "`RepeatCheck`: FSDP1 keeps gradients where they cannot be set aside; use fsdp2, or leave it out."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._calls.release()
        if self.is_due(trainer):
            self._calls.listen(pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._calls.silence()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._calls.made:  # by whichever of several optimizers steps first
            self._check(trainer, pl_module)
        self._calls.release()

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        named = [(unwrapped(name), p) for name, p in module.named_parameters() if p.requires_grad]
        first = self._noise is None
        prints = [self._pass(trainer, module, [p for _, p in named]) for _ in range(_FIRST_PASSES if first else 2)]
        hashes = torch.stack([hashes for hashes, _ in prints])  # (passes, parts)
        norms = torch.stack([norms for _, norms in prints])
        apart = (norms - norms[0]).abs() / norms.abs().amax(0).clamp_min(torch.finfo(norms.dtype).tiny)
        unequal = (hashes != hashes[0]).any(0)
        alike = (hashes[:, None] == hashes[None]).sum(1).amax(0)  # how many passes most agree on
        found = torch.stack([unequal.double(), apart.amax(0).nan_to_num(0.0), alike.double()])
        ranks = gather_ranks(found).tolist()  # per rank: (3, parts)
        if first:
            self._learn(ranks)
        self._judge(trainer, ["outputs", *(name for name, _ in named)], ranks, first)

    def _pass(self, trainer: Trainer, module: LightningModule, held: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """Hashes and norms, (1 + parameters,), of the outputs and of each gradient."""
        gradients = [p.grad for p in held]
        for parameter in held:
            parameter.grad = None
        try:
            with undisturbed_generators(module.device), torch.enable_grad():
                with trainer.precision_plugin.forward_context():
                    outputs = [o for net, args, kw in self._calls.made for o in tensors(net(*args, **kw))]
                squares = [o.float().square().mean() for o in outputs if o.requires_grad]
                torch.stack([s.full_tensor() if hasattr(s, "full_tensor") else s for s in squares]).sum().backward()  # type: ignore[no-untyped-call]
            parts = [torch.stack([s.detach().reshape(()) for s in squares]), *(_gradient(p) for p in held)]
            whole = torch.stack([bit_hash(local(o.detach())) for o in outputs]).sum()
            hashes = torch.stack([whole, *(bit_hash(part) for part in parts[1:])])
            return hashes, torch.stack([part.double().norm() for part in parts])
        finally:
            for parameter, gradient in zip(held, gradients, strict=True):
                parameter.grad = gradient
            reshard(module)

    def _learn(self, ranks: list[list[list[float]]]) -> None:
        # One pass that is odd among equal ones is a fault; passes of which no three are equal are never equal.
        unequal = any(min(rank[2]) < _FIRST_PASSES - 1 for rank in ranks)
        self._noise = max(max(rank[1]) for rank in ranks) if unequal else 0.0
        if unequal:
            self._noise = max(self._noise, torch.finfo(torch.float32).eps)
            rank_zero_info(
                f"RepeatCheck: passes over the same micro-batch are not equal, their norms differ by up to"
                f" {self._noise:.2g}; only what exceeds {ABOVE_NOISE:g} times that is told. Trainer(deterministic=True)"
                " makes every bit count."
            )

    def _judge(self, trainer: Trainer, parts: list[str], ranks: list[list[list[float]]], first: bool) -> None:
        assert self._noise is not None
        limit = self._noise * (1 if first else ABOVE_NOISE)
        odd = [[i for i in range(len(parts)) if (rank[1][i] > limit if self._noise else rank[0][i])] for rank in ranks]
        Scalars.of(trainer).add(["stability/repeat_mismatches"], [float(sum(map(len, odd)))])
        if not any(odd):
            return
        evidence = {
            "ranks": [rank for rank, found in enumerate(odd) if found],
            "part": parts[min(found[0] for found in odd if found)],
            "difference": max(ranks[rank][1][i] for rank, found in enumerate(odd) for i in found),
        }
        step = Progress.of(trainer).steps
        emit(trainer, Event(step, "silent_corruption", evidence))
        if self.on_violation == "raise":
            raise InvariantViolation(
                f"step {step}: the same micro-batch came out twice not the same on ranks {evidence['ranks']}, first in"
                f" {evidence['part']}; test the devices (lit-stable check-devices) and step back to a checkpoint."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._calls.release()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of a parameter's gradient; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros(1, device=parameter.device)
    gradient = local(parameter.grad.detach())
    return gradient.coalesce().values() if gradient.is_sparse else gradient
