"""Four ranks as two data-parallel by two tensor-parallel: every placement that a parameter can have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_scenarios import main, scenario
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_stable.callbacks import global_grad_norm


@scenario
def norm_over_two_by_two() -> dict[str, Any]:
    """Column- and row-parallel linears, a norm that only FSDP2 shards, and a parameter that stays whole."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor_parallel"], plan)
    whole = model[3].bias
    fully_shard(model, mesh=mesh["data_parallel"], ignored_params={whole})
    torch.manual_seed(1)
    (model(torch.randn(4, 8)) * torch.randn(4, 8)).sum().backward()  # not its square, which a norm keeps constant
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    norms: list[Any] = [None] * 4
    dist.all_gather_object(norms, global_grad_norm(model.parameters()).item())
    placements = sorted({type(x).__name__ for p in model.parameters() for x in getattr(p, "placements", ())})
    reference = torch.cat([g.flatten().double() for g in grads]).norm().item()
    return {"norms": norms, "reference": reference, "placements": placements}


if __name__ == "__main__":
    main()
