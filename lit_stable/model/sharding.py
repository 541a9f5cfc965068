"""What is done to a GPT that knows nothing of it: materialise, split, recompute, compile, shard; block by block.

The model is described on the meta device and comes to life one block at a time: fill it, wrap its residual, shard it.
So the whole model never exists unsharded on one device, and its numbers do not depend on how it is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT, Block
from lit_stable.model.init import init_module
from lit_stable.model.norm import is_norm_or_gain
from lit_stable.model.recompute import Recompute, recomputing
from lit_stable.model.tensor_parallel import split_block, split_ends, tensor_parallel_problems

Compiled = Literal["off", "blocks", "whole"]

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)

UNIT_PARAMETERS = 2**25
"""Neighbouring blocks with no more parameters than this together are one FSDP unit, gathered by one collective. FSDP2's
hooks take the host a few hundred microseconds per unit, which for smaller units is longer than the device computes."""

GATHERED_BYTES = 3 * 2**30
"""A model whose gathered weights take no more than this is not resharded between its forward and its backward pass."""


def build_gpt(
    config: GPTConfig,
    *,
    seed: int,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    tensor_mesh: DeviceMesh | None = None,
    policy: MixedPrecisionPolicy | None = None,
    compile: Compiled = "off",
    fixed_shapes: bool = True,
    recompute: Recompute = False,
    reshard_after_forward: bool | None = None,
) -> GPT:
    """Build a GPT on ``device``, initialised from ``seed``, and shard it over ``mesh`` if there is one.

    Args:
        config: The model.
        seed: Of the initial weights; equal on all ranks.
        device: Where the weights live.
        mesh: The data-parallel ranks, in one dimension, or as copies x shards; ``None``: nothing is sharded.
        tensor_mesh: The ranks that split each matrix between them; ``None``: none is split.
        policy: Mixed precision of the sharded parameters; norms and an fp32 head are exempt from it.
        compile: ``blocks``: each block's computation on its own, so that compile time does not grow with depth, and
            FSDP2's hooks stay outside of the compiled code; and the last norm. ``whole``: blocks and last norm in one
            graph; without a ``mesh``. Either way the embedding by itself, on CUDA and without a ``tensor_mesh``.
        fixed_shapes: Compile for one batch shape; ``False``: for any, after a second shape was seen.
        recompute: What of a block is computed again in the backward pass, see `recomputing`.
        reshard_after_forward: Free a unit's gathered weights after its forward pass and gather them again in the
            backward pass; ``None``: see `reshards_after_forward`.

    Raises:
        ValueError: when the model cannot be split over so many ranks; one line per problem.
    """
    if tensor_mesh is not None and (problems := tensor_parallel_problems(config, tensor_mesh.size())):
        raise ValueError("\n".join(problems))
    with torch.device("meta"):
        gpt = GPT(config)
    gpt.blocks_compiled = compile != "off"
    if reshard_after_forward is None:
        split = 1 if tensor_mesh is None else tensor_mesh.size()
        dtype = (policy.param_dtype if policy is not None else None) or torch.float32
        reshard_after_forward = reshards_after_forward(_parameters(gpt) // split * dtype.itemsize)
    index = 0
    for unit in _units(list(gpt.blocks)):
        for block in unit:
            _materialise(block, f"blocks.{index}.", config, device, seed)
            index += 1
            if tensor_mesh is not None:
                assert isinstance(block, Block)
                split_block(block, tensor_mesh)
            _wrap_residual(block, compile == "blocks", fixed_shapes, recompute)
        if mesh is not None:
            _shard(unit, mesh, policy, reshard_after_forward)
    for name, child in gpt.named_children():
        if name != "blocks":
            _materialise(child, f"{name}.", config, device, seed)
    if tensor_mesh is not None:
        split_ends(gpt, tensor_mesh)
    gpt.tie()
    if compile == "whole":
        gpt.compute = _compiled(gpt.compute, fixed_shapes)  # type: ignore[method-assign]
    elif compile == "blocks":
        gpt.norm.forward = _compiled(gpt.norm.forward, fixed_shapes)
    if compile != "off" and tensor_mesh is None and device.type == "cuda":
        # Uncompiled, it launches a dozen kernels that cast, add and sort. On a CPU it stays so: compiled, it sums the
        # embedding's gradient in any order, as on CUDA attention does with its own, and a resume would not be exact.
        gpt.enter = _compiled(gpt.enter, fixed_shapes)  # type: ignore[method-assign]
    if mesh is not None:
        # A tied head lives in the root's group, so the root follows the head; else the fp32 head has its own group.
        if config.head_fp32 and not config.tied:
            _shard([gpt.head], mesh, FP32)
        _shard([gpt], mesh, FP32 if config.head_fp32 and config.tied else policy)
    return gpt


def reshards_after_forward(gathered_bytes: float) -> bool:
    """The default: free gathered weights after the forward pass where all of them take more than `GATHERED_BYTES`."""
    return gathered_bytes > GATHERED_BYTES


def _units(blocks: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """FSDP units: runs of neighbouring blocks with up to `UNIT_PARAMETERS` together, or one larger block."""
    unit: list[nn.Module] = []
    for block in blocks:
        if unit and _parameters(*unit, block) > UNIT_PARAMETERS:
            yield unit
            unit = []
        unit.append(block)
    yield unit


def _parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def norm_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of all norm layers: FSDP2 leaves them whole on every rank.

    A mixed-precision policy rounds weights before the module can upcast them, so norms need to stay out of it; a
    group of their own would put its hooks inside the compiled blocks. They are small (two vectors a block): every rank
    keeps them in fp32, and the strategy averages their gradients once per optimizer step.
    """
    return {p for m in module.modules() if is_norm_or_gain(m) for p in m.parameters(recurse=False)}


def _materialise(module: nn.Module, prefix: str, config: GPTConfig, device: torch.device, seed: int) -> None:
    module.to_empty(device=device)
    init_module(module, prefix, config, seed)


def _wrap_residual(block: nn.Module, compile_block: bool, fixed_shapes: bool, recompute: Recompute) -> None:
    # The method, not the module: names in checkpoints stay the same, and the hooks of a sharded block run outside.
    residual = recomputing(block.residual, recompute)
    if compile_block:
        residual = _compiled(residual, fixed_shapes)
    block.residual = residual


def _compiled(function: Any, fixed_shapes: bool) -> Any:
    dynamic = False if fixed_shapes else None  # None: after a second shape was seen
    # Dropout draws what it draws where nothing is compiled: a replay, which looks at each module, drops the same.
    return torch.compile(function, dynamic=dynamic, options={"fallback_random": True})


def _shard(
    unit: list[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None,
    reshard_after_forward: bool | None = None,
) -> None:
    fully_shard(
        unit,
        mesh=mesh,
        mp_policy=policy or MixedPrecisionPolicy(cast_forward_inputs=False),
        reshard_after_forward=reshard_after_forward,
        ignored_params=set().union(*(norm_parameters(module) for module in unit)),
    )
