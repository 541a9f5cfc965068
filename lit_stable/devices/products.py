"""Matrix products with a known answer, on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_stable.callbacks.bit_hash import bit_hash

Product = Callable[[Tensor, Tensor], Tensor]

#: Rows and columns. Elements are -2 to 2, so that a sum of so many products is a whole number that fp32 holds exactly,
#: in whatever order it is added up and whether or not the hardware rounds factors to TF32.
SIZE = {"cuda": 4096, "cpu": 256}
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class ProductTest:
    """What products on a device came to."""

    problems: list[str] = field(default_factory=list)
    hash: int = 0
    """Of the bits of all results."""
    tflops: float = 0.0
    """Of bf16 products, in 1e12 operations a second."""


def try_products(device: torch.device, rounds: int = 20, product: Product = torch.matmul) -> ProductTest:
    """Multiply two matrices ``rounds`` times in fp32 and bf16 and compare each result with the answer, to the bit.

    Args:
        device: Where.
        rounds: How often, >= 2: what fails now and then fails with a chance in each.
        product: What multiplies.
    """
    size, found = SIZE.get(device.type, SIZE["cpu"]), ProductTest()
    left, right, answer = known_product(size)
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        for dtype in _DTYPES:
            factors, right_one = (left.to(device, dtype), right.to(device, dtype)), answer.to(device).to(dtype)
            _compare(found, dtype, [product(*factors) for _ in range(rounds)], right_one)
        found.tflops = _speed(device, size, rounds, product)
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    return found


def known_product(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices (size, size) fp32 of small whole numbers, and their product, computed on the CPU."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-2, 3, (size, size), generator=generator).float() for _ in range(2))
    return left, right, left @ right


def _compare(found: ProductTest, dtype: torch.dtype, results: list[Tensor], answer: Tensor) -> None:
    name = str(dtype).removeprefix("torch.")
    first = results[0]
    unequal = sum(not torch.equal(result, first) for result in results[1:])
    if unequal:
        found.problems.append(f"{unequal} of {len(results)} times the same {name} product had other bits")
    wrong = sum(not torch.equal(result, answer) for result in results)
    if wrong:
        off = max(int((result != answer).sum()) for result in results)
        found.problems.append(f"{wrong} of {len(results)} {name} products were wrong, in up to {off} elements")
    found.hash ^= int(bit_hash(first))


def _speed(device: torch.device, size: int, rounds: int, product: Product) -> float:
    matrix = torch.zeros(size, size, device=device, dtype=torch.bfloat16)
    product(matrix, matrix)
    _wait(device)
    start = time.perf_counter()
    for _ in range(rounds):
        product(matrix, matrix)
    _wait(device)
    return 2 * size**3 * rounds / (time.perf_counter() - start) / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
