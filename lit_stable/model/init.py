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

# Put into names by recomputation, compile and FSDP1.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")
_RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


def initialise(gpt: GPT, seed: int) -> None:
    """Fill every parameter of `gpt` from `seed`, also after a meta build and `to_empty`, and tie what is tied."""
    gpt.tie()
    init_module(gpt, "", gpt.config, seed)


@torch.no_grad()
def init_module(module: nn.Module, prefix: str, config: GPTConfig, seed: int) -> None:
    """Fill every parameter in `module`, whose place in the GPT is `prefix` ("blocks.3.", or "" for the whole).

    Linear and embedding weights: normal, mean 0, std `declared_std`. Norm gains: 1. Biases: 0. The draw is fp32 and
    is rounded to the parameter's dtype. Fill before sharding: the draw is of the whole parameter.
    """
    for name, param in module.named_parameters(prefix.removesuffix(".")):
        std = declared_std(name, param, config)
        if std is None:
            param.fill_(declared_constant(name))
            continue
        generator = torch.Generator(param.device).manual_seed(mix(seed, zlib.crc32(_plain(name, config).encode())))
        draw = torch.empty(param.shape, device=param.device, dtype=torch.float32).normal_(0, std, generator=generator)
        param.copy_(draw)


def declared_std(name: str, param: torch.Tensor, config: GPTConfig) -> float | None:
    """The standard deviation that a parameter starts with; None for gains and biases, which start constant."""
    if param.ndim < 2:
        return None
    if config.residual_rescale and _WRAPPERS.sub("", name).endswith(_RESIDUAL_OUTPUTS):
        # 2L sub-layers add to the residual stream; their variances sum to that of one.
        return config.std / math.sqrt(2 * config.n_layer)
    return config.std


def declared_constant(name: str) -> float:
    """What a parameter without std starts with: norm gains 1, biases 0."""
    return 0.0 if name.endswith("bias") else 1.0


@dataclass(frozen=True)
class InitRow:
    """One parameter in the audit.

    `declared` and `measured` are standard deviations about zero where `drawn`, else the constant and the entry that is
    furthest from it.
    """

    name: str
    shape: tuple[int, ...]
    drawn: bool
    declared: float
    measured: float
    ok: bool


def audit_init(named_full_tensors: Iterable[tuple[str, torch.Tensor]], config: GPTConfig) -> list[InitRow]:
    """Measure initial weights against what the configuration declares, after every pass that may have changed them.

    A drawn tensor of n entries is right when its std is within five standard errors, 5 / sqrt(2 n), of the declared
    one (relative, at least 1e-3); a constant one when every entry is exact. Tensors must be whole, not shards; each
    costs one read from its device.
    """
    return [_audit_row(_plain(name, config), tensor.detach(), config) for name, tensor in named_full_tensors]


def format_audit(rows: list[InitRow]) -> str:
    """A table with one line per kind of parameter, blocks taken together, and then one line per row that is off."""
    groups: dict[str, list[InitRow]] = {}
    for row in rows:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", row.name), []).append(row)
    width = max(map(len, [*groups, "parameter"]))
    lines = [f"{'parameter':{width}}  count  law       declared    measured (min, max)       off"]
    for name, group in groups.items():
        low, high = min(row.measured for row in group), max(row.measured for row in group)
        off = sum(not row.ok for row in group)
        law = "normal" if group[0].drawn else "constant"
        lines.append(
            f"{name:{width}}  {len(group):5}  {law:8}  {group[0].declared:<10.6g}  {low:<11.6g} {high:<11.6g}  {off:4}"
        )
    for row in rows:
        if not row.ok:
            lines.append(f"OFF {row.name} {row.shape}: measured {row.measured:.6g}, declared {row.declared:.6g}")
    return "\n".join(lines)


def _audit_row(name: str, tensor: torch.Tensor, config: GPTConfig) -> InitRow:
    std, shape = declared_std(name, tensor, config), tuple(tensor.shape)
    if std is None:
        constant = declared_constant(name)
        measured = constant + _furthest(tensor.float() - constant)
        return InitRow(name, shape, False, constant, measured, measured == constant)
    measured = tensor.float().square().mean().sqrt().item()  # about zero, so that a shifted mean shows too
    tolerance = max(5 / math.sqrt(2 * tensor.numel()), 1e-3)
    return InitRow(name, shape, True, std, measured, abs(measured / std - 1) <= tolerance)


def _furthest(deviations: torch.Tensor) -> float:
    return deviations[deviations.abs().argmax()].item()


def _plain(name: str, config: GPTConfig) -> str:
    """The name that decides the draw: free of wrappers, and one for a tied matrix whichever module is filled first."""
    name = _WRAPPERS.sub("", name)
    return "wte.weight" if config.tied and name == "head.weight" else name
