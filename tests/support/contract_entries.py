"""The table of the contract: every public callback, with arguments with which it acts in a run of four steps.

A new callback needs one line in ``ENTRIES``. All forms of the contract read it: one process
(tests/callbacks/test_contract.py), two ranks (tests/distributed/test_contract_two_ranks.py) and GPUs (tests/gpu/).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback

import lit_stable.callbacks as package
from lit_stable.callbacks.base import StabilityCallback
from lit_stable.callbacks.monitor import Monitor


@dataclass(frozen=True)
class Entry:
    """How one callback is tried.

    A step is 8 samples in micro-batches of 2 per rank, and a sample is 4 positions of 4 features. The module is a
    linear layer, a layer norm, dropout and a second linear layer. In the second step the last rank's loss is far too
    large, so that what watches for spikes has one.
    """

    acts: dict[str, Any] = field(default_factory=dict)
    """Arguments with which it does its work within the first three steps."""
    idle: dict[str, Any] | None = None
    """Arguments with which it must change nothing; None: those above, since it only watches."""
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Callbacks that it needs beside it, with their arguments."""
    draws: bool = False
    """Whether to seed the generators is its very work: it is compared in a module that draws nothing."""
    strategies: tuple[str, ...] = ("auto", "ddp", "fsdp", "fsdp2")
    """Those under which it runs."""
    width: int = 8
    """Hidden features of the module."""
    waits: bool = False
    """Whether its steps may wait for the device, after the first two."""
    trouble: bool = False
    """Whether it answers events, so that one is told of in the second step."""
    later: tuple[str, ...] = ()
    """Keys that it logs once something has happened, or is asked for, that is not here."""
    ends: bool = False
    """Whether the end of a fit changes the weights, so that no run goes on from there."""
    no_scaler: str = ""
    """What it says when it refuses a gradient scaler."""


ENTRIES = {
    "AccumulationWindows": Entry({"global_batch": 8, "micro_batch": 2}, later=("progress/counted_tokens",)),
    "ActivationMonitor": Entry({"modules": {"fc1": ["net.0"], "fc2": ["net.3"]}}),
    "Alarm": Entry({"command": "true"}),
    "AttentionMonitor": Entry(),
    "BatchSizeWarmup": Entry(
        {"ramp": "4 for 1 steps then 8", "global_batch": 8, "micro_batch": 2},
        idle={"ramp": "8 for 1 steps", "global_batch": 8, "micro_batch": 2},
        later=("progress/counted_tokens",),
    ),
    "BlackBox": Entry(),
    "DeferredLogging": Entry(),
    "Detectors": Entry(),
    "DiskSpace": Entry({"min_free_gib": 1e-3}),
    "EffectiveLR": Entry(),
    "EightBitAdam": Entry(
        {"min_8bit_size": 1, "on_load": "convert"},
        idle={"bits": 32, "on_load": "convert"},
        strategies=("auto", "ddp", "fsdp2"),
    ),
    "Events": Entry(),
    "ForwardReplay": Entry(),
    "GarbageCollection": Entry({"every_steps": 2}),
    "GracefulStop": Entry(),
    "GradClip": Entry({"max_norm": 0.05}, idle={"max_norm": 1e6}),
    "GradNorm": Entry(),
    "GradSpikeSkip": Entry({"threshold": 30.0}, idle={}),
    "GradientMonitor": Entry(),
    "HangWatchdog": Entry(),
    "InvariantCheck": Entry(),
    "LRBackoff": Entry({"factor": 0.5}, idle={"kinds": "never"}, trouble=True),
    "LROverride": Entry({"start": 1, "factor": 0.5, "betas": (0.5, 0.9)}, idle={"start": 1_000_000, "factor": 0.5}),
    "LateReads": Entry(),
    "LayerNormFreeze": Entry({"rules": [{"start": 1, "stop": 3}]}, idle={"rules": [{"start": 1_000_000}]}),
    "OptimizerMonitor": Entry(),
    "OptimizerReset": Entry({"start": 1, "hold_steps": 2}, idle={"start": 1_000_000}),
    "OutputMonitor": Entry({"head": "net.3"}),
    "Progress": Entry(),
    "QKClip": Entry({"threshold": 0.1}, idle={"threshold": 1e9}, strategies=("auto", "ddp", "fsdp2")),
    "Recovery": Entry(
        {"rungs": [{"do": "lr", "factor": 0.5}, {"do": "stop"}], "triggers": {"spike": "lr"}},
        idle={"rungs": [{"do": "lr", "factor": 0.5}, {"do": "stop"}], "triggers": {"never": "lr"}},
        beside={"Detectors": {}},
        trouble=True,
    ),
    "RecoveryTime": Entry({"rise": 0.1}),
    "RepeatCheck": Entry({"every_steps": 2}, strategies=("auto", "ddp", "fsdp2")),
    "RunControl": Entry(later=("stability/control_lr_factor",)),
    "SafeCheckpoints": Entry(),
    "SampleText": Entry({"prompt_ids": [[1, 2], [3]], "new_tokens": 4}),
    "Scalars": Entry(),
    "ScriptedSkip": Entry({"steps": [2]}, idle={"steps": [1_000_000]}),
    "SequenceLengthWarmup": Entry(
        {"shape": "2 for 2 steps", "max_length": 4}, idle={"shape": "4 for 1 steps", "max_length": 4}
    ),
    "SkipAwareEMA": Entry(
        {"decay": 0.5},
        idle={"decay": 0.0},  # at the end the average becomes the weights
        beside={"GradSpikeSkip": {"threshold": 30.0}},
        strategies=("auto", "ddp"),  # Lightning's WeightAveraging shards nothing
        waits=True,
        ends=True,
    ),
    "SourceLoss": Entry({"names": ["a", "b"]}),
    "StepSeed": Entry({"seed": 1}, draws=True),
    "StepTimer": Entry({"warmup_steps": 0}),
    "Throughput": Entry({"peak_flops": 1e12}),
    "TokenStatistics": Entry({"vocab_size": 8}),
    "UpdateClip": Entry({"threshold": 0.5}, idle={"threshold": 1e9}),
    "UpdateMonitor": Entry(),
    "ValidateEverySteps": Entry({"every": 2}, waits=True),  # a validation does
    "WeightMonitor": Entry(),
}


def public_callbacks() -> dict[str, type[Callback]]:
    """Every callback class that a module of the package defines, by name."""
    found: dict[str, type[Callback]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        try:
            module = importlib.import_module(f"{package.__name__}.{info.name}")
        except ImportError:  # skip_aware_ema, where Lightning has no WeightAveraging
            continue
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, Callback) and value.__module__ == module.__name__:
                found[name] = value
    for base in (StabilityCallback, Monitor):
        del found[base.__name__]
    return {name: cls for name, cls in found.items() if not name.startswith("_")}


CLASSES = public_callbacks()
#: What changes a run: the others watch, count, save or stop.
ACTING = [name for name, entry in ENTRIES.items() if entry.idle is not None and name in CLASSES]


def make(name: str, arguments: dict[str, Any]) -> Any:
    """A callback by its class's name."""
    return CLASSES[name](**arguments)


def takes_action(name: str) -> bool:
    """Whether it has ``action: log``."""
    return "action" in inspect.signature(CLASSES[name]).parameters


def watches(name: str) -> bool:
    """Whether it changes nothing of the training, so that many like it can be tried in one fit."""
    return ENTRIES[name].idle is None and not ENTRIES[name].draws and name != "AccumulationWindows"


def groups(strategy: str) -> dict[str, tuple[str, ...]]:
    """What is tried together under a strategy, by a name: each callback that acts alone, those that watch at once.

    One process tries each callback by itself; where a fit is dear, a watcher's state still has its own name.
    """
    names = [name for name, entry in ENTRIES.items() if strategy in entry.strategies]
    return {**{n: (n,) for n in names if not watches(n)}, "watchers": tuple(filter(watches, names))}


#: Those that act, so that each does its work beside the others; what skips the step with the spike stands apart from
#: what acts upon it.
COMPANIES = {
    "company of GradClip": ("BatchSizeWarmup", "GradClip", "LROverride", "LayerNormFreeze", "UpdateClip"),
    "company of GradSpikeSkip": (
        *("EightBitAdam", "GradSpikeSkip", "LRBackoff", "OptimizerReset", "QKClip", "ScriptedSkip"),
        "SequenceLengthWarmup",
    ),
}


def companies(strategy: str) -> dict[str, tuple[str, ...]]:
    """The same, with those that can act beside each other at once: for two processes, where a fit is dearest."""
    shared = {name for company in COMPANIES.values() for name in company}
    alone = {group: names for group, names in groups(strategy).items() if not shared.issuperset(names)}
    together = {
        company: tuple(name for name in names if strategy in ENTRIES[name].strategies)
        for company, names in COMPANIES.items()
    }
    return {**alone, **together}
