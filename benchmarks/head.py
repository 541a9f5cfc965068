"""Measure an untied head and its loss alone, forwards and both ways, by number of words and precision, on CUDA.

bf16 and fp32 are the head of `model.gpt.head_fp32: false` and `true` in training, `HeadLoss`; "not padded" is the same
on words that are not rounded up to a multiple of 64. "logits" is the product alone, as validation makes it.
A script; it is no test.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from triton.testing import do_bench
from turns import device_name

from lit_stable.model import head_loss
from lit_stable.model.head_loss import HeadLoss

SHAPES = {"124m": (32 * 1024, 768), "1b3": (8 * 2048, 2048)}  # rows and columns of the hidden states
PADDED = head_loss.WORD_MULTIPLE


class Case:
    """Hidden states, weight and labels of one size, and what is measured of them."""

    def __init__(self, rows: int, width: int, vocab: int) -> None:
        self.hidden, self.weight = (0.3 * torch.randn(n, width, device="cuda") for n in (rows, vocab))
        self.labels = torch.randint(vocab, (rows,), device="cuda")

    def forwards(self, wide: bool) -> torch.Tensor:
        operands = torch.float16 if wide else torch.bfloat16
        losses: torch.Tensor = HeadLoss.apply(self.hidden, self.weight, self.labels, operands, wide)  # type: ignore[no-untyped-call]
        return losses

    def both_ways(self, wide: bool) -> None:
        leaves = [self.hidden.requires_grad_(), self.weight.requires_grad_()]
        torch.autograd.grad(self.forwards(wide).mean(), leaves)

    def logits(self, wide: bool) -> None:
        dtype = torch.float32 if wide else torch.bfloat16
        F.linear(self.hidden.detach().to(dtype), self.weight.detach().to(dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--words", nargs="+", type=int, default=[50304, 50257])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # products of fp32 by TF32 units
    print(device_name(), torch.__version__, f"medians of {args.rounds} rounds, ms")
    print("| rows x columns | words | precision | forwards | both ways | both ways, not padded | logits |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for size in args.sizes:
        for vocab in args.words:
            case = Case(*SHAPES[size], vocab)
            for wide in (False, True):
                times = [_times(case, wide) for _ in range(args.rounds)]
                columns = " | ".join(f"{statistics.median(column):.2f}" for column in zip(*times, strict=True))
                rows, width = SHAPES[size]
                print(f"| {rows:,} x {width} | {vocab} | {'fp32' if wide else 'bf16'} | {columns} |", flush=True)


def _times(case: Case, wide: bool) -> list[float]:
    head_loss.WORD_MULTIPLE = PADDED
    times = [_milliseconds(lambda: case.forwards(wide)), _milliseconds(lambda: case.both_ways(wide))]
    head_loss.WORD_MULTIPLE = 1
    times.append(_milliseconds(lambda: case.both_ways(wide)))
    head_loss.WORD_MULTIPLE = PADDED
    return [*times, _milliseconds(lambda: case.logits(wide))]


def _milliseconds(function: Callable[[], object]) -> float:
    taken: float = do_bench(function, warmup=20, rep=100)
    return taken


if __name__ == "__main__":
    main()
