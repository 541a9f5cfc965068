"""Clipped queries and keys on two ranks; see rank_scenarios.py."""

from __future__ import annotations

from typing import Any

from rank_scenarios import fit2, main, scenario
from tiny_fit import Watch

from lit_stable.callbacks import QKClip, ScriptedSkip
from lit_stable.callbacks.shards import local
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


@scenario
def qk_clip_skips_fsdp2() -> list[int]:
    """Steps, of which the third is skipped, that have changed this rank's pieces."""
    before: list[Any] = []
    moved: set[int] = set()

    def compare(trainer: Any, *_: Any) -> None:
        pieces = [local(p.detach()).clone() for p in trainer.lightning_module.parameters()]
        if any(not old.equal(new) for old, new in zip(before, pieces, strict=True)):
            moved.add(trainer.global_step)
        before[:] = pieces

    def begin(trainer: Any, *_: Any) -> None:
        before[:] = [local(p.detach()).clone() for p in trainer.lightning_module.parameters()]

    watches = (Watch("on_train_start", begin), Watch("on_train_batch_end", compare))
    fit2("fsdp2", callbacks=(QKClip(THRESHOLD), ScriptedSkip([3]), *watches), **{**OPTIONS, "steps": 4})
    return sorted(moved)


if __name__ == "__main__":
    main()
