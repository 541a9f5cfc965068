"""Clipped queries and keys on two ranks; see rank_scenarios.py."""

from __future__ import annotations

from typing import Any

from rank_scenarios import fit2, main, scenario

from lit_stable.callbacks import QKClip
from lit_stable.strategies.mesh import MeshOptions

#: Every head has larger logits than that from the start on; two query heads share a key head.
OPTIONS: dict[str, Any] = {"steps": 3, "n_head": 4, "n_kv_head": 2, "bias": True, "validates": False}
THRESHOLD = 0.02


def _clipped(strategy: str, **options: Any) -> dict[str, Any]:
    run = fit2(strategy, callbacks=(QKClip(THRESHOLD),), **OPTIONS, **options)
    return {
        "weights": {name: weight.tolist() for name, weight in run.weights.items()},
        "clipped": float(run.trainer.callback_metrics["stability/qk_clipped_heads"]),
        "largest": float(run.trainer.callback_metrics["stability/qk_logit_max"]),
    }


@scenario
def qk_clip_ddp() -> dict[str, Any]:
    return _clipped("ddp")


@scenario
def qk_clip_fsdp2() -> dict[str, Any]:
    return _clipped("fsdp2")


@scenario
def qk_clip_tensor_parallel() -> dict[str, Any]:
    return _clipped("fsdp2", mesh=MeshOptions(tensor_parallel=2))


if __name__ == "__main__":
    main()
