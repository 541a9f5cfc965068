"""Monitors with several processes, against the definitions; see rank_scenarios.py."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from activations_by_hand import LastBatch, expected_of
from by_hand import ByHand, differences, norm, whole
from lightning.pytorch import Callback, Trainer
from rank_scenarios import fit2, fsdp1, main, rank, scenario, shared_folder
from text_logger import TextLogger
from tiny_fit import Watch
from tiny_gpt_run import LENGTH, MICRO_BATCH, Fit, equal_bits, tiny_module
from tokens_by_hand import by_hand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_stable.callbacks import (
    ActivationMonitor,
    AttentionMonitor,
    Events,
    GradientMonitor,
    InvariantCheck,
    InvariantViolation,
    OptimizerMonitor,
    OutputMonitor,
    Progress,
    RecoveryTime,
    SampleText,
    SourceLoss,
    StepTimer,
    Throughput,
    TokenStatistics,
    UpdateMonitor,
    WeightMonitor,
)
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.parameter_sums import ParameterSums
from lit_stable.model.generate import generate
from lit_stable.model.gpt import GPT
from lit_stable.module import GPTModule

OPTIONS: dict[str, Any] = {"embed_norm": True, "qk_norm": "rmsnorm", "bias": True}
PROMPTS = [[1, 2, 3], [7]]
FAMILIES = ("stability/activation_", "stability/attention_logit", "stability/log_z", "stability/output_logit")


def of_both_ranks(value: Any) -> list[Any]:
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def numbers(run: Fit, *families: str) -> dict[str, float]:
    return {n: float(v) for n, v in run.trainer.callback_metrics.items() if n.startswith(families or ("stability/",))}


def _by_hand(strategy: str) -> dict[str, Any]:
    """Parameters and activations, both against whole tensors."""
    hand, last = ByHand(), LastBatch()
    parameters = (WeightMonitor(), GradientMonitor(None, True), UpdateMonitor(None, True), OptimizerMonitor(None, True))
    inside = (ActivationMonitor(), AttentionMonitor(), OutputMonitor())
    run = fit2(strategy, steps=3, callbacks=(hand, last, *parameters, *inside), max_norm=1e9, dropout=0.1, **OPTIONS)
    weights = {name: weight.cpu() for name, weight in last.weights.items()}
    found, expected = numbers(run, *FAMILIES), expected_of(run.module.config, weights, last.ids.cpu())
    relative = {name: abs(found.get(name, 0.0) / value - 1) for name, value in expected.items()}
    ours = {name: value for name, value in numbers(run).items() if not name.startswith("stability/clip")}
    return {
        "parameters": [len(hand.expected), differences(hand.expected, run.trainer.callback_metrics)],
        "inside": [sorted(found.keys() ^ expected.keys()), max(relative.values())],
        "ranks_agree": len({repr(each) for each in of_both_ranks(ours)}) == 1,
    }


@scenario
def by_hand_ddp() -> dict[str, Any]:
    return _by_hand("ddp")


@scenario
def by_hand_fsdp2() -> dict[str, Any]:
    return _by_hand("fsdp2")


def everything() -> tuple[Callback, ...]:
    return (
        *(WeightMonitor(), GradientMonitor(), UpdateMonitor(), OptimizerMonitor()),
        *(ActivationMonitor(), AttentionMonitor(), OutputMonitor(), TokenStatistics(), SourceLoss(names=["all"])),
        *(StepTimer(), Throughput(), RecoveryTime(), InvariantCheck()),
        SampleText(prompt_ids=PROMPTS, new_tokens=6, temperature=0.9),
    )


def _bits(strategy: str, **options: Any) -> dict[str, Any]:
    bare = fit2(strategy, steps=4, dropout=0.2, **options)
    watched = fit2(strategy, steps=4, dropout=0.2, callbacks=everything(), **options)
    return {"bits": of_both_ranks(equal_bits(bare.weights, watched.weights)), "rows": bare.rows == watched.rows}


@scenario
def bits_ddp() -> dict[str, Any]:
    return _bits("ddp")


@scenario
def bits_fsdp2() -> dict[str, Any]:
    return _bits("fsdp2")


@scenario
def bits_fsdp2_bf16() -> dict[str, Any]:
    return _bits("fsdp2", precision="bf16-mixed", tied=False, head_fp32=True, recompute=False)


def _held(trainer: Any) -> int:
    return sum(p.grad.numel() for p in trainer.lightning_module.parameters() if p.grad is not None)


@scenario
def watched_fsdp() -> dict[str, Any]:
    """FSDP1: its run with monitors, passes without gradients among them, is the run without; numbers are DDP's."""
    held: set[int] = set()  # elements of gradients after a micro-batch, in an open window and at its end
    bare = fit2(fsdp1(), steps=3, callbacks=(Watch("on_after_backward", lambda trainer: held.add(_held(trainer))),))
    freed: set[bool] = set()
    note = Watch("on_train_batch_start", lambda trainer, *_: freed.add(trainer.strategy.model._handle.needs_unshard()))
    watched = fit2(fsdp1(), steps=3, callbacks=(*everything(), note))
    other = fit2("ddp", steps=3, callbacks=everything())
    rows = torch.tensor(bare.rows) - torch.tensor(watched.rows)
    families = ("weight_rms", "norm_gain", "grad_norm_", "update_rms", "adam_grad_rms", "activation_rms", "log_z")
    ours, theirs = (numbers(run, *(f"stability/{family}" for family in families)) for run in (watched, other))
    return {
        "apart": float(rows.abs().max()),
        "freed": sorted(freed),  # after a validation too
        "held": sorted(held),
        "off": max(abs(ours[name] - value) / (abs(value) + 1e-3) for name, value in theirs.items()),
        "count": len(theirs),
        "violations": numbers(watched, "stability/invariant_violations")["stability/invariant_violations"],
    }


class SleepsOnRank1(GPTModule):
    """Sleeps 0.2 seconds in the first micro-batch of every step from the third on; ``once``: a second, in one step."""

    where = "training_step"
    once = False

    def _sleep(self, where: str) -> None:
        step, progress = self.trainer.global_step + 1, Progress.of(self.trainer)
        is_first = progress.pending_samples <= MICRO_BATCH * 2  # counted when the batch begins
        if where == self.where and rank() == 1 and is_first and (step == 8 if self.once else step >= 3):
            time.sleep(1.0 if self.once else 0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._sleep("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and not Progress.of(self.trainer).pending_samples:
            self._sleep("data")
        return batch


def _late(strategy: str, where: str, once: bool) -> dict[str, Any]:
    template = tiny_module()
    module = SleepsOnRank1(template.config, template.schedule, compile="off")
    module.where, module.once = where, once
    channel = Events()
    channel.folder = shared_folder()
    timer = StepTimer(every_steps=9, margin_seconds=0.05, warmup_steps=1)
    fit2(strategy, steps=9, callbacks=(channel, _Logging(9), timer), module=module)
    path = channel.folder / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return {"events": [[e.kind, e.step, e.evidence] for e in events]}


class _Logging(Callback):
    """Logs every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        trainer.log_every_n_steps = self.every  # type: ignore[attr-defined]


@scenario
def late_in_every_training_step_ddp() -> dict[str, Any]:
    return _late("ddp", "training_step", once=False)


@scenario
def late_in_every_batch_fsdp2() -> dict[str, Any]:
    return _late("fsdp2", "data", once=False)


@scenario
def late_once_fsdp2() -> dict[str, Any]:
    return _late("fsdp2", "training_step", once=True)


class FlipsABit(Callback):
    """Flips one bit of one element of one parameter, on rank 1 alone, before the second step's check."""

    def __init__(self, name: str, bit: int = 20) -> None:
        self.name, self.bit = name, bit

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1 and rank() == 1:
            data = dict(pl_module.named_parameters())[self.name].data
            data.view(-1).view(torch.int32)[3] ^= 1 << self.bit


def _flipped(strategy: str, name: str, violation: str) -> dict[str, Any]:
    folder = shared_folder()
    channel = Events()
    channel.folder = folder
    error = ""
    try:
        fit2(strategy, steps=3, callbacks=(channel, FlipsABit(name), InvariantCheck(None, None, violation)))
    except InvariantViolation as found:
        error = str(found)
    path = folder / "events.jsonl"
    events = [[e.step, e.evidence] for e in read_events(path)] if path.exists() else []
    return {"errors": of_both_ranks(error), "events": events}


@scenario
def flipped_ddp() -> dict[str, Any]:
    return _flipped("ddp", "gpt.blocks.0.mlp.up.weight", "tell")


@scenario
def flipped_ddp_raises() -> dict[str, Any]:
    return _flipped("ddp", "gpt.wte.weight", "raise")


@scenario
def flipped_norm_fsdp2() -> dict[str, Any]:
    return _flipped("fsdp2", "gpt.blocks.1.mlp_norm.weight", "tell")


@scenario
def nothing_flipped_fsdp2() -> dict[str, Any]:
    run = fit2("fsdp2", steps=3, callbacks=(InvariantCheck(tied=[["gpt.wte.weight", "gpt.head.weight"]]),))
    return {"violations": numbers(run, "stability/invariant_violations")}


@scenario
def tokens_and_sources_ddp() -> dict[str, Any]:
    """Tokens of both ranks' micro-batches, and the loss of the one source that there is."""
    rows: list[list[int]] = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 1:
                rows.extend(batch["input_ids"].tolist())

    run = fit2("ddp", steps=2, callbacks=(Keep(), TokenStatistics(ngram=2), SourceLoss(names=["all", "none"])))
    expected = by_hand([row for own in of_both_ranks(rows) for row in own], 2)
    found = numbers(run)
    return {
        "tokens": [[found[name], value] for name, value in expected.items()],
        "loss": [found["stability/source_loss/all"], float(run.trainer.callback_metrics["train/loss"])],
        "shares": [found["stability/source_share/all"], found["stability/source_share/none"]],
    }


@scenario
def samples_fsdp2() -> dict[str, Any]:
    """Greedy text under fsdp2 is what the whole model writes."""
    folder, logger = shared_folder(), TextLogger()
    channel = Events()
    channel.folder = folder

    class Loggers(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            trainer.loggers = [logger]

    sample = SampleText(prompt_ids=PROMPTS, new_tokens=LENGTH, temperature=0.0)
    run = fit2("fsdp2", steps=2, callbacks=(channel, Loggers(), sample))
    gpt = GPT(run.module.config).to(run.module.device)
    gpt.load_state_dict({name.removeprefix("gpt."): w for name, w in run.weights.items()}, strict=False)
    gpt.tie()
    whole_model = generate(gpt, PROMPTS, LENGTH, temperature=0.0)
    sharded = generate(run.module.gpt, PROMPTS, LENGTH, temperature=0.0)
    lines = (folder / "samples.txt").read_text().splitlines()
    return {
        "written": [[int(i) for i in line.split("|")[1].split()] for line in lines if "|" in line][-2:],
        "whole": whole_model,
        "sharded": of_both_ranks(sharded),
        "texts": [[key, step] for key, _, step in logger.texts],
    }


def _sums(shape: tuple[int, int]) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    parallelize_module(model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data_parallel"], ignored_params={model[3].bias})
    torch.manual_seed(1)
    (model(torch.randn(4, 8)) * torch.randn(4, 8)).sum().backward()
    named = dict(model.named_parameters())
    sums = ParameterSums(named)
    with torch.no_grad():
        both = sums.squares(list(named.values())), sums.squares([p.grad for p in named.values()])
        found = torch.stack(sums.total(*both))
    expected = [[norm([whole(p)]) ** 2 for p in named.values()], [norm([whole(p.grad)]) ** 2 for p in named.values()]]
    return {
        "found": of_both_ranks(found.tolist()),
        "expected": expected,
        "sizes": [sums.sizes.tolist(), [float(p.numel()) for p in named.values()]],
        "placements": sorted({type(x).__name__ for p in named.values() for x in getattr(p, "placements", ())}),
    }


@scenario
def sums_tensor_parallel() -> dict[str, Any]:
    return _sums((1, dist.get_world_size() if dist.is_initialized() else 2))


@scenario
def sums_two_by_two() -> dict[str, Any]:
    return _sums((2, 2))


if __name__ == "__main__":
    main()
