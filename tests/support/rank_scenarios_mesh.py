"""Four ranks as two data-parallel by two tensor-parallel: every placement that a parameter can have."""

from __future__ import annotations

from typing import Any

import rank_scenarios_layout  # noqa: F401 - its scenarios share the launch
import torch
import torch.distributed as dist
from rank_scenarios import main, scenario
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_stable.callbacks import global_grad_norm
from lit_stable.callbacks.adam_update import AdamUpdate
from lit_stable.callbacks.grad_norm import tensor_norms
from lit_stable.callbacks.shards import OverShards


def sharded_model() -> nn.Module:
    """Column- and row-parallel linears, a norm and one row that FSDP2 alone shards, and a parameter that stays whole.

    Half of the ranks hold nothing of the row.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor_parallel"], plan)
    whole = model[3].bias
    fully_shard(model, mesh=mesh["data_parallel"], ignored_params={whole})
    return model


def backward(model: nn.Module, scale: float = 1.0) -> list[torch.Tensor]:
    """The gradients, gathered."""
    model.zero_grad()
    (
        model(torch.randn(4, 8)) * torch.randn(4, 8) * scale
    ).sum().backward()  # not its square, which a norm keeps constant
    return [whole(p.grad) for p in model.parameters()]


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gathered(value: Any) -> list[Any]:
    box: list[Any] = [None] * 4
    dist.all_gather_object(box, value)
    return box


@scenario
def norm_over_two_by_two() -> dict[str, Any]:
    dist.init_process_group("gloo")
    model = sharded_model()
    torch.manual_seed(1)
    grads = backward(model)
    norms = gathered(global_grad_norm(model.parameters()).item())
    placements = sorted({type(x).__name__ for p in model.parameters() for x in getattr(p, "placements", ())})
    reference = torch.cat([g.flatten().double() for g in grads]).norm().item()
    return {"norms": norms, "reference": reference, "placements": placements}


@scenario
def each_norm_over_two_by_two() -> dict[str, Any]:
    model = sharded_model()
    torch.manual_seed(1)
    grads = backward(model)
    parameters = list(model.parameters())
    over_shards = OverShards(parameters)
    found = {kind: gathered(tensor_norms(parameters, over_shards, kind).tolist()) for kind in ("l2", "inf")}  # type: ignore[arg-type]
    reference = {"l2": [g.norm().item() for g in grads], "inf": [g.abs().max().item() for g in grads]}
    return {"found": found, "reference": reference, "groups": len(over_shards._members)}


@scenario
def updates_over_two_by_two() -> dict[str, Any]:
    """Updates clipped on the shards, and on the gathered tensors with the same gradients."""
    model = sharded_model()
    parameters = list(model.parameters())
    alone = [nn.Parameter(whole(p)) for p in parameters]
    plain = [p for p in parameters if not hasattr(p, "placements")]  # no kernel takes both kinds together
    groups = [{"params": [p for p in parameters if hasattr(p, "placements")]}, {"params": plain}]
    order = [next(i for i, q in enumerate(parameters) if q is p) for group in groups for p in group["params"]]
    torch.manual_seed(1)
    options = {"lr": 0.01, "betas": (0.9, 0.95)}
    sharded_optimizer = torch.optim.AdamW(groups, **options)  # type: ignore[arg-type]
    alone_optimizer = torch.optim.AdamW([alone[i] for i in order], **options)  # type: ignore[arg-type]
    updates = [AdamUpdate(sharded_optimizer), AdamUpdate(alone_optimizer)]
    sizes, clipped = [], 0
    for scale in (1.0, 1.0, 5.0, 1.0, 20.0):
        for parameter, gradient in zip(alone, backward(model, scale), strict=True):
            parameter.grad = gradient
        rms = []
        for optimizer, update in zip((sharded_optimizer, alone_optimizer), updates, strict=True):
            optimizer.step()
            rms.append(update.rms())
            update.take_back(torch.where(rms[-1] > 1.1, 1 - 1.1 / rms[-1], 0.0))
        sizes.append([gathered(rms[0].tolist()), rms[1].tolist()])
        clipped += int((rms[0] > 1.1).sum())
    apart = max((whole(p) - q).abs().max().item() for p, q in zip(parameters, alone, strict=True))
    return {"rms": sizes, "apart": apart, "clipped": clipped}


if __name__ == "__main__":
    main()
