"""Where the device's time goes: kernels in a step of what `throughput.py` compares, by kind. A script; it is no test.

Each program trains one turn under torch's profiler, which slows the host and not the kernels; what a step takes is
measured by `throughput.py`. A kernel counts to the first kind that its name is of. Gaps are what lies between two
kernels of a step, when the device waits for nothing but the next of them.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
import tempfile
import time

import lightning
import plain_loop
import torch
from throughput import BESIDE, RECIPES, UNCOUNTED, Quiet, contenders, makers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from turns import device_name, set_up

KINDS = {
    "matrix products": r"gemm|nvjet|cutlass|splitK|^_head_product",
    "attention": r"flash|fmha|cudnn|sdpa",
    "head's loss": r"_losses|^_gradient|^_head_softmax|softmax|nll_loss",
    "GELU": r"gelu|^_slope|erf",
    "optimizer and norm": r"multi_tensor_apply",
    "norms": r"layer_norm|GammaBeta",
    "casts and copies": r"to_copy|copy_kernel|Memcpy|Memset",
    "other": r"",
}
GAPS = "gaps between kernels"
LONGEST_GAP = 100  # microseconds; where the host is behind, or a turn begins or ends, the device waits longer


def kind_of(kernel: str) -> str:
    """The first of `KINDS` that a kernel's name is of."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel))


def kernel_times(contender: Quiet, steps: int) -> tuple[dict[str, float], list[tuple[float, float, str]]]:
    """Milliseconds per step by kind; and of every kernel milliseconds, launches per step, and its name."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        contender.turn()
    spent: collections.Counter[str] = collections.Counter()
    launched: collections.Counter[str] = collections.Counter()
    kernels = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    for event in kernels:
        spent[event.name] += event.device_time_total / steps / 1e3
        launched[event.name] += 1
    by_kind = dict.fromkeys(KINDS, 0.0)
    for name, taken in spent.items():
        by_kind[kind_of(name)] += taken
    by_kind[GAPS] = gaps([(event.time_range.start, event.time_range.end) for event in kernels]) / steps / 1e3
    return by_kind, [(taken, launched[name] / steps, name) for name, taken in spent.most_common()]


def gaps(kernels: list[tuple[float, float]]) -> float:
    """Beginnings and ends of kernels, in microseconds -> what all gaps of at most `LONGEST_GAP` come to."""
    total, busy_until = 0.0, -math.inf
    for start, end in sorted(kernels):
        gap = start - busy_until
        if 0 < gap <= LONGEST_GAP:
            total += gap
        busy_until = max(busy_until, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=RECIPES, default="124m")
    parser.add_argument("--steps", type=int, default=20, help="counted steps in a turn")
    programs = ["plain", "fit", *BESIDE]
    parser.add_argument("--of", nargs="+", choices=programs, default=programs[:2], help="as throughput.py names them")
    parser.add_argument("--longest", type=int, default=0, metavar="N", help="print also the N longest kernels of each")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here, whose kernels could be timed")
    set_up()
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as root:
        known = makers(arguments.size, root, arguments.steps)
        found, _ = contenders(arguments.size, root, arguments.steps, arguments.of)
        columns = {}
        for which in arguments.of:
            if (contender := found.get(known[which][0])) is None:  # it is not installed
                continue
            plain = isinstance(contender.contender, plain_loop.PlainLoop)
            steps = arguments.steps + (plain_loop.UNCOUNTED if plain else UNCOUNTED)
            columns[which], kernels = kernel_times(contender, steps)
            for taken, launches, kernel in kernels[: arguments.longest]:
                print(f"{which}: {taken:9.3f} ms in {launches:7.2f} launches  {kernel[:120]}")
    print(f"{time.strftime('%Y-%m-%d')}, {device_name()}, torch {torch.__version__}, lightning {lightning.__version__}")
    print(f"{RECIPES[arguments.size][1]}, ms of kernels in a step")
    print("| |" + "".join(f" {which} |" for which in columns))
    print("|---|" + "--:|" * len(columns))
    for kind in [*KINDS, GAPS]:
        print(f"| {kind} |" + "".join(f" {column[kind]:.2f} |" for column in columns.values()))
    print("| all |" + "".join(f" {sum(column.values()):.2f} |" for column in columns.values()))


if __name__ == "__main__":
    main()
