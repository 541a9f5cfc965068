"""Skipping with two processes, of which one alone has the cause; see rank_scenarios.py."""

from __future__ import annotations

import functools
import math
import traceback
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from rank_scenarios import SCENARIOS, NaNGradient, fit2, main, rank, scenario, shared_folder
from tiny_gpt_run import SaveEveryMicroBatch, equal_bits, tiny_module

from lit_stable.callbacks import Events, GracefulStop, GradSpikeSkip, Progress
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.spike_events import TooManySkips
from lit_stable.module import GPTModule
from lit_stable.strategies.loss_scale import LossScale

STEPS = 8


class LocalBits(Callback):
    """This rank's own piece of every parameter, after each step."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        local = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in pl_module.named_parameters()}
        self.seen[Progress.of(trainer).steps] = {name: tensor.detach().clone() for name, tensor in local.items()}


class BadLossOnRankOne(GPTModule):
    """In two steps the loss of rank 1, and of no other, is far too large or not finite."""

    factors: ClassVar[dict[int, float]] = {4: 1e6, 6: math.nan}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        factor = self.factors.get(Progress.of(self.trainer).steps, 1.0) if rank() == 1 else 1.0
        return super().training_step(batch, batch_idx) * factor


def skip(**options: Any) -> GradSpikeSkip:
    return GradSpikeSkip(**{"z_score": 8.0, "warmup_steps": 3, "window": 8, **options})


def gathered(value: Any) -> list[Any]:
    box: list[Any] = [None, None]
    dist.all_gather_object(box, value)
    return box


def _bad_loss(strategy: str, **options: Any) -> dict[str, Any]:
    module = tiny_module()
    module.__class__ = BadLossOnRankOne
    callback, bits, channel = skip(**options), LocalBits(), Events()
    channel.folder = shared_folder()
    run = fit2(strategy, steps=STEPS, callbacks=(callback, bits, channel), module=module)
    return {
        "written": [p.name for p in channel.folder.iterdir()],
        "told": [(e.step, e.kind) for e in read_events(channel.folder / "events.jsonl")],
        "events": gathered([(e.step, e.cause) for e in callback.events]),
        "unchanged": gathered([s for s in range(2, STEPS + 1) if equal_bits(bits.seen[s], bits.seen[s - 1])]),
        "skipped": gathered(Progress.of(run.trainer).skipped),
        "statistics_agree": len({repr(state) for state in gathered(callback.state_dict()["detector"])}) == 1,
    }


@scenario
def bad_loss_ddp() -> dict[str, Any]:
    return _bad_loss("ddp", signal="both")


@scenario
def bad_loss_fsdp2() -> dict[str, Any]:
    return _bad_loss("fsdp2", signal="loss")


@scenario
def bad_shard_resumed_fsdp2() -> dict[str, Any]:
    """One rank's shard of the gradient turns NaN in step 4: resumed from before, between and after, bit for bit."""
    folder = shared_folder()

    def run(*callbacks: Callback, path: Path | None = None) -> tuple[Any, str]:
        callback = skip()
        nan = NaNGradient(4, only_rank=1)
        done = fit2("fsdp2", steps=6, callbacks=(callback, *callbacks), nan=nan, ckpt_path=path)
        return done, repr(callback.state_dict())

    straight, state = run()
    saving, saved_state = run(SaveEveryMicroBatch(folder))
    resumed = {}
    for point in (6, 9):  # two micro-batches a step: before the bad one, and in the window behind it
        again, again_state = run(path=folder / f"m{point}.ckpt")
        resumed[str(point)] = [equal_bits(straight.weights, again.weights), again_state == state]
    return {
        "saving_changes_nothing": equal_bits(straight.weights, saving.weights) and saved_state == state,
        "resumed": resumed,
        "skipped": gathered(Progress.of(straight.trainer).skipped),
    }


@scenario
def stop_at_the_cap() -> dict[str, Any]:
    """From step 5 on the loss of rank 1 alone stays far too large: both stop, at the same step."""

    class Stays(GPTModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            worse = rank() == 1 and Progress.of(self.trainer).steps >= 4
            return super().training_step(batch, batch_idx) * (1e6 if worse else 1.0)

    module, callback, bits = tiny_module(), skip(max_skips=2, at_cap="stop"), LocalBits()
    module.__class__ = Stays
    try:
        fit2("fsdp2", steps=20, callbacks=(callback, bits), module=module)
        ended = "at its last step"
    except TooManySkips as error:
        ended = f"{type(error).__name__}: {error}"
    return {
        "ended": gathered(ended),
        "events": gathered([e.step for e in callback.events]),
        "unchanged": gathered([s for s in range(2, max(bits.seen) + 1) if equal_bits(bits.seen[s], bits.seen[4])]),
    }


@scenario
def no_loss() -> dict[str, Any]:
    """``training_step`` returns None: Lightning refuses that on more than one rank, and no callback is in the way."""

    class NoLoss(GPTModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if Progress.of(self.trainer).steps == 1 else super().training_step(batch, batch_idx)

    module, callback = tiny_module(), skip()
    module.__class__ = NoLoss
    try:
        fit2("ddp", steps=3, callbacks=(callback,), module=module)
        ended = "at its last step"
    except RuntimeError as error:
        ended = str(error)
    return {"ended": gathered(ended), "judged": gathered(callback.state_dict()["counts"])}


class NoLossOnRankOne(GPTModule):
    """In its third micro-batch rank 1 has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return None if rank() == 1 and batch_idx == 2 else super().training_step(batch, batch_idx)


@scenario
def no_loss_on_rank_one() -> dict[str, Any]:
    """Comes last, since it ends the launch."""
    folder = shared_folder()
    module = tiny_module()
    module.__class__ = NoLossOnRankOne
    try:
        fit2("ddp", steps=STEPS, callbacks=(skip(), GracefulStop(str(folder))), module=module)
    finally:
        (folder / f"ended-{rank()}").write_text(traceback.format_exc())
    return {}


class OverflowOnRankOne(BadLossOnRankOne):
    """The first is large, and no more than fp16 holds at the scale below; the second is beyond it."""

    factors: ClassVar[dict[int, float]] = {4: 1e3, 6: 1e30}


def _spike_and_overflow(strategy: str, precision: str) -> dict[str, Any]:
    """Both change nothing; where there is a loss scale, only the second lowers it."""
    module = tiny_module()
    module.__class__ = OverflowOnRankOne
    scales: list[float] = []

    class Scales(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            scaler = trainer.precision_plugin.scaler
            if scaler is not None and not Progress.of(trainer).pending_samples:
                scales.append(scaler.get_scale())

    callback, bits = skip(), LocalBits()
    options = {"precision": precision, "loss_scale": LossScale(init=16.0, window=100), "max_norm": None}
    run = fit2(strategy, steps=STEPS, callbacks=(callback, bits, Scales()), module=module, **options)
    return {
        "events": gathered([[e.step, e.cause] for e in callback.events]),
        "unchanged": gathered([s for s in range(2, STEPS + 1) if equal_bits(bits.seen[s], bits.seen[s - 1])]),
        "skipped": gathered(Progress.of(run.trainer).skipped),
        "scales": gathered(scales),
    }


#: Under fp16 an overflow is told from a spike, and halves the scale; bf16 knows neither.
SPIKE_AND_OVERFLOW = {
    "16-mixed": {"causes": ["z_score", "overflow"], "scales": [16.0] * 6 + [8.0] * 2},
    "bf16-mixed": {"causes": ["z_score", "non_finite"], "scales": []},
}


def spike_scenarios(*strategies: str) -> list[str]:
    return [f"spike_and_overflow/{strategy}/{precision}" for strategy in strategies for precision in SPIKE_AND_OVERFLOW]


def check_spike_and_overflow(name: str, result: dict[str, Any]) -> None:
    """What :func:`_spike_and_overflow` has to come to on both ranks."""
    expected = SPIKE_AND_OVERFLOW[name.rpartition("/")[2]]
    assert result["events"] == [[[step, cause] for step, cause in zip((5, 7), expected["causes"], strict=True)]] * 2
    assert result["unchanged"] == [[5, 7]] * 2
    assert result["skipped"] == [2, 2]
    assert result["scales"] == [expected["scales"]] * 2


for each in spike_scenarios("ddp", "fsdp", "fsdp2"):
    SCENARIOS[each] = functools.partial(_spike_and_overflow, *each.split("/")[1:])


if __name__ == "__main__":
    main()
