"""Initial weights that depend on nothing but seed and parameter name, and an audit of what the weights really are.

Each parameter has a random generator of its own, so blocks may be filled one by one, in any order and on any number of
ranks, and hold the same numbers (on one kind of device: CPU and GPU generators differ).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lit_stable.callbacks.seeds import mix
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.laws import Law, law_of, plain_name, sinusoids


def initialise(gpt: GPT, seed: int) -> None:
    """Fill every parameter of `gpt` from `seed`, also after a meta build and `to_empty`, and tie what is tied."""
    gpt.tie()
    init_module(gpt, "", gpt.config, seed)


@torch.no_grad()
def init_module(module: nn.Module, prefix: str, config: GPTConfig, seed: int) -> None:
    """Fill every parameter in `module`, whose place in the GPT is `prefix` ("blocks.3.", or "" for the whole).

    Each starts by its law (`laws.py`). The draw is fp32 and is rounded to the parameter's dtype. Fill before sharding:
    the draw is of the whole parameter, and so is the shape that a Xavier bound follows from.
    """
    for name, param in module.named_parameters(prefix.removesuffix(".")):
        law = law_of(name, param.shape, config)
        if law.kind == "constant":
            param.fill_(law.value)
        elif law.kind == "sinusoidal":
            param.copy_(sinusoids(*param.shape))
        else:
            key = mix(seed, zlib.crc32(plain_name(name, config).encode()))
            param.copy_(_draw(law, param, torch.Generator(param.device).manual_seed(key)))


def _draw(law: Law, param: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    draw = torch.empty(param.shape, device=param.device, dtype=torch.float32)
    if law.kind == "uniform":
        return draw.uniform_(-law.bound, law.bound, generator=generator)
    return draw.normal_(0, law.value, generator=generator)


@dataclass(frozen=True)
class InitRow:
    """One parameter in the audit.

    `declared` and `measured` are standard deviations about zero where the law is no constant, else the constant and the
    entry that is furthest from it.
    """

    name: str
    shape: tuple[int, ...]
    law: str
    declared: float
    measured: float
    ok: bool


def audit_init(named_full_tensors: Iterable[tuple[str, torch.Tensor]], config: GPTConfig) -> list[InitRow]:
    """Measure initial weights against what the configuration declares, after every pass that may have changed them.

    A drawn tensor of n entries is right when its std is within five standard errors, 5 / sqrt(2 n), of the declared
    one (relative, at least 1e-3), and no entry of a uniform one is out of bounds; a constant or a table when every
    entry is exact. Tensors must be whole, not shards; each costs one or two reads from its device.
    """
    return [_audit_row(plain_name(name, config), tensor.detach(), config) for name, tensor in named_full_tensors]


def format_audit(rows: list[InitRow]) -> str:
    """A table with one line per kind of parameter, blocks taken together, and then one line per row that is off."""
    groups: dict[str, list[InitRow]] = {}
    for row in rows:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", row.name), []).append(row)
    width = max(map(len, [*groups, "parameter"]))
    lines = [f"{'parameter':{width}}  count  law         declared    measured (min, max)       off"]
    for name, group in groups.items():
        low, high = min(row.measured for row in group), max(row.measured for row in group)
        off = sum(not row.ok for row in group)
        lines.append(
            f"{name:{width}}  {len(group):5}  {group[0].law:10}  {group[0].declared:<10.6g}"
            f"  {low:<11.6g} {high:<11.6g}  {off:4}"
        )
    for row in rows:
        if not row.ok:
            lines.append(f"OFF {row.name} {row.shape}: measured {row.measured:.6g}, declared {row.declared:.6g}")
    return "\n".join(lines)


def _audit_row(name: str, tensor: torch.Tensor, config: GPTConfig) -> InitRow:
    law, shape = law_of(name, tensor.shape, config), tuple(tensor.shape)
    if law.kind == "constant":
        measured = law.value + _furthest(tensor.float() - law.value)
        return InitRow(name, shape, law.kind, law.value, measured, bool((tensor == law.value).all()))
    measured = tensor.float().square().mean().sqrt().item()  # about zero, so that a shifted mean shows too
    tolerance = max(5 / math.sqrt(2 * tensor.numel()), 1e-3)
    ok = abs(measured / law.value - 1) <= tolerance
    if law.kind == "uniform":
        ok = ok and bool((tensor.float().abs() <= law.bound).all())
    if law.kind == "sinusoidal":
        ok = torch.equal(tensor.cpu(), sinusoids(*shape).to(tensor.dtype))
    return InitRow(name, shape, law.kind, law.value, measured, ok)


def _furthest(deviations: torch.Tensor) -> float:
    return deviations[deviations.abs().argmax()].item()
