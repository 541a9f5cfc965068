"""What must be true of a model at all times, checked: replicas equal, ties kept, groups complete, frozen is frozen."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .base import MisconfigurationException
from .bit_hash import bit_hash
from .events import Event, Events, emit
from .monitor import Monitor
from .private_fsdp_names import fsdp1_shards
from .progress import Progress
from .rank_gather import gather_ranks
from .scalars import Scalars
from .shards import fsdp1_model, local
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class InvariantViolation(RuntimeError):
    """Something that must always hold does not."""


class InvariantCheck(Monitor):
    """Check that ranks hold equal weights, ties are kept, groups hold every weight once, frozen ones stand still.

    - **Replicas.** What several ranks hold copies of (DDP; norms under ``fsdp2``; the replicated dimensions of a mesh)
      has equal bits on all of them. A memory fault, or a rank that stepped alone, is found and named: parameter and
      rank, against the majority, or against the lowest rank where there is none.
    - **Ties.** Parameters that were one at the start (and those in ``tied``) are one object in one storage still.
    - **Groups.** At the start: every trainable parameter is in exactly one group of the optimizers.
    - **Frozen.** Parameters with ``requires_grad=False`` have the bits that they had at the first check.

    Bits are hashed on the device (see ``bit_hash``); one collective and one wait per check.

    Event, the same on all ranks: ``invariant``, with what is wrong, parameter, ranks.

    Logged: ``stability/invariant_violations`` (number found by a check, 0 if all is well).

    Args:
        every_steps: Optimizer steps between checks, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step. One reads all weights once.
        tied: Groups of parameter names that must be one: ``[[model.wte.weight, model.head.weight]]``.
        on_violation: ``raise``: the first check that finds something ends the run, on all ranks; ``tell``: it goes on.

    Raises:
        MisconfigurationException: as :class:`Monitor`; at the start, when a name in ``tied`` is no parameter or not
            tied, or a trainable parameter is in no group or in two.
        InvariantViolation: see ``on_violation``.

    Example::

        >>> Trainer(callbacks=[InvariantCheck(every_steps=500)], logger=False)  # doctest: +SKIP
    """

    def __init__(
        self,
        every_steps: int | None = None,
        tied: list[list[str]] | None = None,
        on_violation: Literal["raise", "tell"] = "raise",
    ) -> None:
        super().__init__(every_steps)
        self.tied, self.on_violation = tied, on_violation
        self._parameters: dict[str, nn.Parameter] = {}
        self._ties: list[list[str]] = []
        self._pieces: Tensor | None = None  # (n,) int64: which piece of each parameter this rank holds
        self._frozen: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Events.of(trainer)
            Progress.of(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parameters = {unwrapped(name): p for name, p in pl_module.named_parameters()}
        self._frozen = {}
        self._ties = tied_names(pl_module)
        problems = [problem for names in self.tied or [] if (problem := self._tie_problem(names))]
        held = Counter(p for o in trainer.optimizers for group in o.param_groups for p in group["params"])
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and held[parameter] != 1:
                problems.append(f"{name} is in {held[parameter] or 'no'} optimizer groups; put it into exactly one.")
        if problems:
            raise MisconfigurationException("\n".join(f"`InvariantCheck`: {problem}" for problem in problems))
        model = fsdp1_model(trainer)
        shards = set[nn.Parameter]() if model is None else fsdp1_shards(model)[0]
        pieces = [piece_of(p, p in shards) for p in self._parameters.values()]
        self._pieces = torch.tensor(pieces, dtype=torch.int64, device=trainer.strategy.root_device)

    def _tie_problem(self, names: list[str]) -> str | None:
        if any(set(names) <= set(group) for group in self._ties):
            return None
        return f"tied={names}: are not one parameter at the start; tie them, or correct the names."

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self.has_ended(trainer) or self._pieces is None or not self._parameters:
            return
        found = [*self._broken_ties(pl_module), *self._broken_bits()]
        Scalars.of(trainer).add(["stability/invariant_violations"], [float(len(found))])
        step = Progress.of(trainer).steps
        for evidence in found:
            emit(trainer, Event(step, "invariant", evidence))
        if found and self.on_violation == "raise":
            first = ", ".join(f"{key} {value}" for key, value in found[0].items())
            raise InvariantViolation(f"step {step}: {len(found)} invariants do not hold; the first: {first}.")

    def _broken_ties(self, module: nn.Module) -> list[dict[str, Any]]:
        now = {unwrapped(name): p for name, p in module.named_parameters(remove_duplicate=False)}
        broken = []
        for names in self._ties:
            held = [now.get(name) for name in names]
            if any(p is not held[0] for p in held):
                broken.append({"what": "tied parameters are no longer one", "parameters": names})
        return broken

    def _broken_bits(self) -> list[dict[str, Any]]:
        assert self._pieces is not None
        hashes = torch.stack([bit_hash(local(p.detach())) for p in self._parameters.values()])
        changed = [
            (hashes[i] != self._frozen.setdefault(name, hashes[i])).long() if not p.requires_grad else hashes[i] * 0
            for i, (name, p) in enumerate(self._parameters.items())
        ]
        ranks = gather_ranks(torch.stack([self._pieces, hashes, torch.stack(changed)])).tolist()  # per rank: 3 x n
        broken: list[dict[str, Any]] = []
        for index, name in enumerate(self._parameters):
            pieces, values, moved = ([rank[row][index] for rank in ranks] for row in range(3))
            if any(moved):
                where = [rank for rank, has in enumerate(moved) if has]
                broken.append({"what": "a frozen parameter has changed", "parameter": name, "ranks": where})
            if odd := odd_ranks(pieces, values):
                broken.append({"what": "ranks hold different bits", "parameter": name, "ranks": odd})
        return broken

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._parameters, self._frozen, self._pieces = {}, {}, None


def odd_ranks(pieces: list[int], hashes: list[int]) -> list[int]:
    """The ranks whose copy of a piece is not that of most ranks which hold the piece.

    Where two kinds are equally frequent, that of the lowest rank counts as right: of two ranks nobody can tell.
    """
    odd = []
    for piece in sorted(set(pieces)):
        holders = [rank for rank, held in enumerate(pieces) if held == piece]
        counts = Counter(hashes[rank] for rank in holders)  # in the order of ranks
        right = max(counts, key=lambda value: counts[value])
        odd += [rank for rank in holders if hashes[rank] != right]
    return sorted(odd)


def piece_of(parameter: nn.Parameter, is_fsdp1_shard: bool = False) -> int:
    """A number that two ranks share if they hold copies of one piece of a parameter; 0: the whole of it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if is_fsdp1_shard:
        return 1 + rank
    if not isinstance(parameter, DTensor):
        return 0
    mesh, piece = parameter.device_mesh, 0
    place = mesh.get_coordinate()
    if place is None:
        return 1 + rank
    for placement, index, size in zip(parameter.placements, place, mesh.shape, strict=True):
        if not placement.is_replicate():
            piece = piece * size + index + 1
    return piece


def tied_names(module: nn.Module) -> list[list[str]]:
    """Groups of names, each of one parameter that stands under several."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(unwrapped(name))
    return [names for names in groups.values() if len(names) > 1]
