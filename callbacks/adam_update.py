"""The update that an Adam or AdamW has just made, recomputed from the state that it left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from .base import MisconfigurationException
from .shards import OverShards, local, summed_piece

#: Elements of this rank that are worked on at once (or one tensor, if larger): two fp32 copies are held meanwhile.
CHUNK = 1 << 24


class _Stepped(NamedTuple):
    """Tensors of one group that have just stepped: this rank's pieces."""

    group: dict[str, Any]
    places: list[int]  # among all parameters
    weights: list[Tensor]
    gradients: list[Tensor]
    firsts: list[Tensor]
    seconds: list[Tensor]
    steps: Tensor  # (k,), fp32: steps that each has taken


class AdamUpdate:
    """The size of the last update of every tensor, and a way to take a share of it back after the step.

    The update is linear in the learning rate: ``w -= lr * u`` with ``u = m / (sqrt(v) + eps)``, where ``m`` and ``v``
    are the bias-corrected moments that the step left. So a lower rate for a single tensor, which no fused kernel
    offers, comes to adding a share of ``lr * u`` again, exact but for one more rounding of the weight. This holds for
    the fused, the foreach and the looped kernel, and for any shards. Decoupled decay is left as it is.

    Args:
        optimizer: torch's Adam or AdamW.
        model: What FSDP1 wraps, if it does.

    Raises:
        MisconfigurationException: when the optimizer is another one.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        refuse_other_optimizers(optimizer)
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._over_shards = OverShards(self._parameters, model)
        sizes = [local(p).numel() for p in self._parameters]
        self._chunks = _chunks(optimizer, sizes)
        whole = torch.tensor(sizes, dtype=torch.float32, device=self._parameters[0].device)
        self._sizes = self._over_shards.sum(whole).clamp(min=1)  # an empty tensor has RMS 0

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._parameters)

    @torch.no_grad()
    def rms(self) -> Tensor:
        """Root mean square of ``g / max(sqrt(v), eps)`` over each whole tensor, equal on all ranks; (n,), fp32.

        ``g`` is the gradient as the step used it: without a loss scale, and clipped, since a fused kernel writes back
        what it divided; with a coupled decay if there is one. A tensor that did not step has 0.
        """
        squares = list(torch.zeros_like(self._sizes).unbind())
        for stepped in self._stepped():
            bias = _correction(stepped.group["betas"][1], stepped.steps)
            roots = torch._foreach_sqrt([v.float() for v in stepped.seconds])
            torch._foreach_maximum_(roots, list((stepped.group["eps"] * bias.sqrt()).unbind()))
            ratios = torch._foreach_div(self._gradients(stepped), roots)
            norms = torch.stack(torch._foreach_norm(ratios, 2.0, torch.float32))
            for place, square in zip(stepped.places, (norms.square() * bias).unbind(), strict=True):
                squares[place] = square
        return (self._over_shards.sum(torch.stack(squares)) / self._sizes).sqrt()

    @torch.no_grad()
    def take_back(self, shares: Tensor) -> None:
        """Undo a share of each tensor's last update; (n,), in [0, 1], where 0 leaves every bit of the weights."""
        each = shares.unbind()
        for stepped in self._stepped():
            share = torch.stack([each[place] for place in stepped.places])
            torch._foreach_add_(stepped.weights, _update(stepped, share))

    def _gradients(self, stepped: _Stepped) -> list[Tensor]:
        group, gradients = stepped.group, [g.float() for g in stepped.gradients]
        decoupled = isinstance(self._optimizer, AdamW) or group.get("decoupled_weight_decay", False)
        if decoupled or not group["weight_decay"]:
            return gradients
        before = _update(stepped, torch.ones_like(stepped.steps))
        torch._foreach_add_(before, stepped.weights)
        signed = torch._foreach_mul(gradients, -1.0 if group["maximize"] else 1.0)
        return list(torch._foreach_add(signed, before, alpha=group["weight_decay"]))

    def _stepped(self) -> Iterator[_Stepped]:
        for group_index, members in self._chunks:
            places = [place for place in members if self._parameters[place].grad is not None]
            if places:
                yield self._gather(self._optimizer.param_groups[group_index], places)

    def _gather(self, group: dict[str, Any], places: list[int]) -> _Stepped:
        parameters = [self._parameters[place] for place in places]
        states = [self._optimizer.state[p] for p in parameters]
        second = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        if lacking := {"step", "exp_avg", second} - set(states[0]):
            raise MisconfigurationException(
                f"`UpdateClip`: the state of {type(self._optimizer).__name__} has no {', '.join(sorted(lacking))} but"
                f" {', '.join(states[0]) or 'nothing'}; it takes the state of torch's Adam and AdamW only."
            )
        steps = torch.stack([local(state["step"]) for state in states])  # on the host if the kernel is not fused
        return _Stepped(
            group=group,
            places=places,
            weights=[local(p.detach()) for p in parameters],
            gradients=[summed_piece(p.grad) for p in parameters if p.grad is not None],
            firsts=[local(state["exp_avg"]) for state in states],
            seconds=[local(state[second]) for state in states],
            # A skipped first step leaves 0, with which nothing below would be a number.
            steps=steps.to(self._sizes.device, torch.float32, non_blocking=True).clamp(min=1),
        )


def refuse_other_optimizers(optimizer: Any) -> None:
    """Raise unless the optimizer is torch's Adam or AdamW, over real numbers."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, (Adam, AdamW)):
        raise MisconfigurationException(
            f"`UpdateClip`: {name} is neither torch's Adam nor its AdamW, whose second moments it needs; use one of"
            " them, or clip gradients with `GradClip`."
        )
    if any("exp_avg_codes" in state for state in optimizer.state.values()):
        raise MisconfigurationException(
            f"`UpdateClip`: {name} keeps moments in 8 bit (`EightBitAdam`), rounded after the step, so no update can be"
            " taken back from them; leave one of the two callbacks out."
        )
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise MisconfigurationException(f"`UpdateClip`: {name} holds complex parameters, which it cannot judge.")


def _chunks(optimizer: Optimizer, sizes: list[int]) -> list[tuple[int, list[int]]]:
    """(index of the group, places among all parameters) of at most ``CHUNK`` elements each."""
    chunks: list[tuple[int, list[int]]] = []
    place = 0
    for index, group in enumerate(optimizer.param_groups):
        room = -1  # not even for the empty piece of a rank: a group begins a chunk
        for _ in group["params"]:
            if sizes[place] > room:
                chunks.append((index, []))
                room = CHUNK
            chunks[-1][1].append(place)
            room -= sizes[place]
            place += 1
    return chunks


def _update(stepped: _Stepped, shares: Tensor) -> list[Tensor]:
    """A share of ``lr * u`` of each tensor, fp32."""
    group = stepped.group
    first, second = (_correction(beta, stepped.steps) for beta in group["betas"])
    roots = torch._foreach_sqrt([v.float() for v in stepped.seconds])
    torch._foreach_add_(roots, list((group["eps"] * second.sqrt()).unbind()))
    update = list(torch._foreach_div([m.float() for m in stepped.firsts], roots))
    torch._foreach_mul_(update, list((shares * group["lr"] * second.sqrt() / first).unbind()))
    return update


def _correction(beta: Any, steps: Tensor) -> Tensor:
    """``1 - beta^steps`` in fp32, without the digits that the plain formula would lose early on."""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))
