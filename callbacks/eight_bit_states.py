"""The optimizer state of a parameter in 8 or 32 bit: fresh, converted, placed; sharded as the parameter is.

In 32 bit it is Adam's own (``exp_avg``, ``exp_avg_sq``), always fp32. In 8 bit each moment is a tensor of codes, uint8
and of the parameter's shape, and one of block maxima, fp32, (rows, blocks in a row). Beside a DTensor both are DTensors
on its mesh, so that checkpoints reshard them like the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .eight_bit_blocks import Moment, Rows, StateMap, column_cuts, dequantize_moments, quantize, rows_of, state_maps
from .eight_bit_layout import BLOCK, Bits
from .shards import local

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES, MAXIMA = "_codes", "_absmax"
KEYS: dict[Bits, tuple[str, ...]] = {
    32: MOMENTS,
    8: tuple(name + part for name in MOMENTS for part in (CODES, MAXIMA)),
}


def fresh_state(parameter: Tensor, bits: Bits) -> dict[str, Any]:
    """The state before the first step: all zeros, as a new optimizer of bitsandbytes has it in 8 bit too.

    Zero maxima make every code stand for zero.
    """
    piece = local(parameter)
    rows = rows_of(parameter) if bits == 8 else None
    state: dict[str, Any] = {"step": torch.zeros((), device=piece.device)}
    for key in KEYS[bits]:
        if rows is not None and key.endswith(MAXIMA):
            value = torch.zeros(rows.height, rows.maxima, device=piece.device)
        else:
            value = torch.zeros(piece.shape, dtype=torch.float32 if bits == 32 else torch.uint8, device=piece.device)
        state[key] = _beside(parameter, key, value)
    return state


def bits_of(state: Mapping[str, Any]) -> Bits | None:
    """How a state is kept; ``None`` if it is no state of Adam that is known here."""
    for bits, keys in KEYS.items():
        if all(key in state for key in keys):
            return bits
    return None


def moment(state: Mapping[str, Any], name: str, qmap: Tensor, rows: Rows) -> Moment:
    """One 8-bit moment of a state, as this rank holds it."""
    return Moment(local(state[name + CODES]).view(rows.height, rows.width), local(state[name + MAXIMA]), qmap)


def convert(
    parameter: Tensor, state: Mapping[str, Any], bits: Bits, to_map: StateMap, from_map: StateMap = "dynamic"
) -> Mapping[str, Any]:
    """The same state kept in other bits, or by another map; the step count stays.

    Where rows are cut through a block this is a collective, so all ranks convert alike.
    """
    if bits_of(state) == bits and (bits == 32 or to_map == from_map):
        return state
    rows, device = rows_of(parameter), local(parameter).device
    converted = fresh_state(parameter, bits)
    converted["step"].copy_(local(state["step"]))
    moments = _fp32_moments(state, state_maps(from_map, device), rows)
    for name, values, new_map in zip(MOMENTS, moments, state_maps(to_map, device), strict=True):
        if bits == 32:
            exp_avg = local(converted[name])
            exp_avg.copy_(rows.unpad(values).reshape(exp_avg.shape))
            continue
        codes, maxima = quantize(values, new_map, rows)
        kept = moment(converted, name, new_map, rows)
        kept.codes.copy_(codes)
        kept.maxima.copy_(maxima)
    return converted


def place(parameter: Tensor, key: str, value: Any) -> Any:
    """A value out of a checkpoint as it stands in the state of ``parameter``: on its device, and sharded as it is.

    Codes stay uint8 and moments are fp32: torch's own loading would cast both to the dtype of the parameter.
    """
    piece = local(parameter)
    if key == "step":
        return torch.as_tensor(local(value) if isinstance(value, Tensor) else value, dtype=torch.float32).to(
            piece.device
        )
    value = value.to(piece.device, torch.float32 if key in MOMENTS else value.dtype).contiguous()
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):  # whole, as every rank read it from a file
        whole = [Replicate()] * parameter.device_mesh.ndim
        everywhere = DTensor.from_local(value, parameter.device_mesh, whole, run_check=False)
        value = everywhere.redistribute(placements=_placements(parameter, key))
    return value


def state_bytes(states: Any) -> int:
    """Bytes of the moments in some states, codes and maxima, over all shards."""
    return sum(v.numel() * v.element_size() for state in states for key, v in state.items() if key != "step")


def _fp32_moments(state: Mapping[str, Any], maps: tuple[Tensor, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    if bits_of(state) == 8:
        first, second = (moment(state, name, qmap, rows) for name, qmap in zip(MOMENTS, maps, strict=True))
        return dequantize_moments(first, second, rows)
    # Clones, since `quantize` writes into the sides.
    exp_avg, exp_avg_sq = (local(state[n]).to(torch.float32).reshape(rows.height, rows.width) for n in MOMENTS)
    return rows.pad(exp_avg).clone(), rows.pad(exp_avg_sq).clone()


def _beside(parameter: Tensor, key: str, value: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    shape = parameter.shape
    if key.endswith(MAXIMA):
        shape = torch.Size([shape[0], -(-rows_of(parameter).total // BLOCK)])
    stride = torch.empty(shape, device="meta").stride()
    placements = _placements(parameter, key)
    return DTensor.from_local(value, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _placements(parameter: DTensor, key: str) -> list[Any]:
    """Those of the parameter; the maxima of cut blocks are whole on every rank that holds a piece of them."""
    placements = list(parameter.placements)
    if key.endswith(MAXIMA) and rows_of(parameter).group is not None:
        for index in column_cuts(parameter):
            placements[index] = Replicate()
    return placements
