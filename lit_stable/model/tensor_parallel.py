"""Split the matrices of a GPT over tensor-parallel ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

Activations between sub-layers are whole on every rank. The first matrix of a sub-layer is split by its outputs, the
second by its inputs, and one sum over the ranks puts the sub-layer's output together; its bias is added once. The
token embedding and the head are split by vocabulary; logits are gathered, so that the loss and whatever looks at logits
know nothing of it. Norms are whole and see whole inputs, which makes their gradients whole as well: what stands inside
an MLP is gathered for its norm. Those inside attention alone, of queries and keys, see a part of the heads each.

The numbers are those of one device up to the order of summation, dropout included: what is drawn for whole
activations is drawn alike by all ranks, and attention draws per group of heads (see ``attention_dropout``).
"""

from __future__ import annotations

from functools import partial
from operator import mul
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from lit_stable.model.attention_dropout import dropout_groups
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import Block
from lit_stable.model.norm import is_norm_or_gain


def tensor_parallel_problems(config: GPTConfig, ranks: int) -> list[str]:
    """What keeps a model from being split over so many ranks."""
    problems = []
    heads = "n_head" if config.n_kv_head is None else "n_kv_head"
    for name, size in ((heads, config.kv_heads), ("d_ff", config.hidden), ("vocab_size", config.vocab_size)):
        if size % ranks:
            below = size // ranks * ranks
            legal = " and ".join(str(n) for n in (below, below + ranks) if n)
            problems.append(
                f"model.gpt.{name}={size}: must be a multiple of mesh.tensor_parallel={ranks}; nearest legal: {legal}."
            )
    groups = dropout_groups(config.kv_heads)
    dropout = "dropout" if config.attention_dropout is None else "attention_dropout"
    rate = config.dropout_of("attention")
    if rate and config.kv_heads % ranks == 0 and groups % ranks:
        problems.append(
            f"model.gpt.{dropout}={rate}: attention draws it for {groups} groups of heads, which"
            f" mesh.tensor_parallel={ranks} cannot share evenly; take a size that divides {groups}, or no dropout."
        )
    return problems


def split_block(block: Block, mesh: DeviceMesh) -> None:
    """Split a block, already filled with its whole weights, over a one-dimensional mesh.

    Raises:
        NotImplementedError: when a part with parameters has no place in the plan.
    """
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp": whole,  # once for both of a gated MLP's inputs: one sum of their gradients instead of two
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    _split(block, mesh, plan)
    for norm in filter(is_norm_or_gain, block.mlp.modules()):
        before = PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Replicate(), use_local_output=True)
        after = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-1))
        for style in (before, after):
            parallelize_module(norm, mesh, style)
    first_head = block.attention.n_head // mesh.size() * mesh.get_local_rank()
    for module in block.attention.modules():
        if hasattr(module, "first_head"):
            module.first_head = first_head  # type: ignore[assignment]  # an int; torch expects modules here
    for norm in filter(is_norm_or_gain, block.attention.modules()):
        for parameter in norm.parameters(recurse=False):
            # Its gradient is over this rank's heads alone. Times the number of ranks, the mean over all ranks, which
            # is what whole parameters get, is the sum over these.
            parameter.register_hook(partial(mul, mesh.size()))  # type: ignore[no-untyped-call]


def split_ends(gpt: nn.Module, mesh: DeviceMesh) -> None:
    """Split what stands before and behind the blocks; a tied head is tied again by the caller."""
    plan: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "wpe": ColwiseParallel(output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    _split(gpt, mesh, plan, skip="blocks")
    gpt.get_submodule("wte").register_forward_hook(_wait)


def _wait(wte: nn.Module, ids: tuple[Any, ...], stream: Tensor) -> Tensor:
    """A copy of the embedded tokens (B, T, D), whose sum over ranks is done then.

    Compiled code that gets a tensor of a collective under way hands no gradient back through it (torch 2.13). The first
    block would get one if nothing is done to the embedding before, as with rotary positions, and it would not learn.
    """
    return stream.clone()


def _split(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle], skip: str = "") -> None:
    # The root is named "" as well, and has no parameters of its own.
    parts = {name: part for name, part in module.named_modules() if name.split(".")[0] != skip}
    for name, part in parts.items():
        if name not in plan and not is_norm_or_gain(part) and list(part.parameters(recurse=False)):
            raise NotImplementedError(f"{name} ({type(part).__name__}): has parameters and no place in the plan.")
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in parts})
