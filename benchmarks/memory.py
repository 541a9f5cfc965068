"""Measure peak memory against the plan of `lit-stable check`, for models of several kinds. A script, not a test.

Each configuration trains a few steps with the real trainer, in processes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from turns import Stopwatch, build, device_name, set_up

from lit_stable.cli.check import memory_parts

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "tied": "false"}
CONFIGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "124M": (["gpt2_124m"], {}),
    "124M, fsdp2": (["gpt2_124m"], {"trainer.strategy": "fsdp2"}),
    "124M, recompute": (["gpt2_124m"], {"model.recompute": "true"}),
    "124M, recompute: selective": (["gpt2_124m"], {"model.recompute": "selective"}),
    "124M, compile: off": (["gpt2_124m"], {"model.compile": "off"}),
    "124M, fp32": (["gpt2_124m"], {"trainer.precision": "32-true"}),
    "124M, residual and head in fp32": (
        ["gpt2_124m"],
        {f"model.gpt.{k}": "true" for k in ("residual_fp32", "head_fp32")},
    ),
    "124M, RMSNorm, SwiGLU, RoPE, untied": (["gpt2_124m"], {f"model.gpt.{key}": value for key, value in LLAMA.items()}),
    "124M, T 2048, EightBitAdam": (
        ["gpt2_124m", "stability/eight_bit_adam"],
        {"model.gpt.max_length": 2048, "data.sequence_length": 2048, "data.micro_batch": 16},
    ),
    "350M": (["gpt2_124m", "sizes/350m"], {}),
    "1.3B": (["gpt_1b3"], {"trainer.strategy": "auto"}),
    "1.3B, fsdp2, one micro-batch a step": (["gpt_1b3"], {"window": 1}),
    "8B shape, 8 layers, EightBitAdam": (
        ["sizes/llama_8b", "stability/eight_bit_adam"],
        {"model.gpt.n_layer": 8, "published.parameters": "null"},
    ),
}


def measure(name: str, result: str) -> None:
    """Train in this process, one of those that `launch` starts; rank 0 writes planned and peak bytes to ``result``."""
    set_up()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    configs, options = CONFIGS[name][0], dict(CONFIGS[name][1])
    window = options.pop("window", 2)
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
        options["trainer.devices"] = ranks
        micro_batch = build(configs, root, **options).datamodule.micro_batch
        options["data.global_batch"] = window * micro_batch * ranks
        cli = build(configs, root, **options)
        trainer, data = cli.trainer_options, cli.datamodule
        parts = memory_parts(cli.model, data, trainer, cli.features, ranks, cli.mesh)
        cli.trainer.callbacks.append(Stopwatch(2, 2))
        cli.trainer.fit(cli.model, datamodule=data)
        if cli.trainer.is_global_zero:
            found = {"planned": sum(parts.values()), "peak": torch.cuda.max_memory_allocated()}
            Path(result).write_text(json.dumps(found))


def launch(name: str, devices: int) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torchrun = [*("-m", "torch.distributed.run", "--standalone"), *("--nproc-per-node", str(devices))]
        command = [
            sys.executable,
            *(torchrun if devices > 1 else []),
            __file__,
            "--name",
            name,
            "--result",
            str(result),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not result.exists():
            print(f"{name}: failed\n{(done.stdout + done.stderr)[-2000:]}", flush=True)
            return None
        found: dict[str, float] = json.loads(result.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="configurations whose names contain one of these")
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result:
        measure(arguments.name, arguments.result)
        return
    print(f"{time.strftime('%Y-%m-%d')}, {arguments.devices} x {device_name()}, torch {torch.__version__}")
    print("| Configuration | planned, GiB | peak, GiB | planned to peak |")
    print("|---|--:|--:|--:|")
    for name in CONFIGS:
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        if (found := launch(name, arguments.devices)) is not None:
            planned, peak = found["planned"] / 2**30, found["peak"] / 2**30
            print(f"| {name} | {planned:.2f} | {peak:.2f} | {100 * (planned / peak - 1):+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
