"""Overrides of the learning rate and resets of the optimizer with two processes; see rank_scenarios.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_scenarios import fit2, main, scenario, shared_folder
from scheduled_fit import Rates
from tiny_fit import TinyData, TinyModule, quiet_trainer
from tiny_gpt_run import SaveEveryMicroBatch, equal_bits, whole_weights
from torch.distributed.fsdp import fully_shard

from lit_stable.callbacks import LROverride, OptimizerReset
from lit_stable.strategies import fsdp2

STEPS = 6


def both() -> tuple[Any, ...]:
    """At step 2 half the rate and another decay; at step 3 a reset with two steps at rate 0."""
    return LROverride(start=2, factor=0.5, betas=(0.8, 0.9)), OptimizerReset(start=3, hold_steps=2)


def _resumed(strategy: str, points: tuple[int, ...]) -> dict[str, Any]:
    folder, rates = shared_folder(), Rates()
    straight = fit2(strategy, steps=STEPS, callbacks=(*both(), rates, SaveEveryMicroBatch(folder)))
    schedule = straight.module.schedule
    factors = [1.0, 1.0, 0.5, 0.0, 0.0, 0.5]
    expected = [schedule.lr(8 * k) * factor for k, factor in enumerate(factors)]
    equal = {}
    for point in points:
        again = fit2(strategy, steps=STEPS, callbacks=both(), ckpt_path=folder / f"m{point}.ckpt")
        equal[str(point)] = equal_bits(again.weights, straight.weights)
    counts = {int(state["step"]) for state in straight.trainer.optimizers[0].state.values()}
    return {
        "rates": [lrs[0] for lrs in rates.used] == expected,
        "equal": equal,
        "counts": sorted(counts),
        "checkpoint": str(folder / "m7.ckpt"),
        "rows": straight.rows,
    }


@scenario
def override_and_reset_ddp() -> dict[str, Any]:
    return _resumed("ddp", (7,))


@scenario
def override_and_reset_fsdp2() -> dict[str, Any]:
    return _resumed("fsdp2", (3, 7))


@scenario
def dummy_step_of_the_state_getter() -> dict[str, Any]:
    """An optimizer without state takes a dummy step at every sharded save and load: no override may act on it."""

    class Sharded(TinyModule):
        def count_batch(self, batch: torch.Tensor) -> tuple[int, int]:
            return len(batch) // 2, len(batch) // 2  # both ranks read the same samples

        def configure_model(self) -> None:
            if not any(hasattr(p, "full_tensor") for p in self.parameters()):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def run(*callbacks: Any, resume: Any = None) -> Any:
        rates = Rates()
        override = LROverride(schedule=[(0, 0.2)])
        trainer = quiet_trainer(override, rates, *callbacks, max_steps=2, strategy=fsdp2.FSDP2Strategy(), devices=2)
        module = Sharded(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5))
        trainer.fit(module, TinyData(), ckpt_path=resume)
        return whole_weights(module), rates.used

    folder = shared_folder()
    saved, _ = run(SaveEveryMicroBatch(folder))
    unsaved, _ = run()
    resumed, rates = run(resume=folder / "m1.ckpt")
    return {"equal": [equal_bits(saved, unsaved), equal_bits(saved, resumed)], "rates": rates}


@scenario
def reset_of_a_shard_is_judged_by_all_ranks() -> dict[str, Any]:
    """A moment that is not zero on one rank alone stops both."""
    from lightning.pytorch import Callback

    class Fill(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2 and trainer.global_rank == 1:
                for state in trainer.optimizers[0].state.values():
                    moment = state["exp_avg"]
                    (moment.to_local() if hasattr(moment, "to_local") else moment).fill_(1.0)

    messages: list[Any] = [None, None]
    try:
        fit2("fsdp2", steps=3, callbacks=(OptimizerReset(start=2), Fill()))
        own = "nothing was refused"
    except Exception as error:
        own = str(error)
    dist.all_gather_object(messages, own)
    return {"messages": messages}


if __name__ == "__main__":
    main()
