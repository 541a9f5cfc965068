"""The test of every device of this process, or of each rank's, and of what ranks send each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from lit_stable.callbacks.rank_gather import gather_objects
from lit_stable.devices.links import Send, try_links
from lit_stable.devices.products import Product, try_products
from lit_stable.devices.verdict import CPU, Found, page, verdict
from lit_stable.strategies.launcher import launched_devices


def check_devices(
    rounds: int = 20,
    timeout: float = 120.0,
    accelerator: str = "auto",
    product: Product = torch.matmul,
    sent: Send = lambda tensor: tensor,
) -> int:
    """Test, print the page on rank 0, and return the exit code, the same on all ranks.

    Args:
        rounds: How often each product is taken, >= 2.
        timeout: Seconds that a rank waits for another; one that does not answer ends the test with an error.
        accelerator: ``auto`` (CUDA where there is one), ``cuda`` or ``cpu``.
        product: What multiplies, and
        sent: what becomes of a tensor before it leaves this rank: for drills.

    Raises:
        ValueError: when ``cuda`` is asked for and torch sees none.
    """
    on_cuda = accelerator == "cuda" or (accelerator == "auto" and torch.cuda.is_available())
    if on_cuda and not torch.cuda.is_available():
        raise ValueError("accelerator=cuda: torch sees no CUDA device here.")
    if launched_devices() is None:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if on_cuda else ["cpu"]
        found = [_test(torch.device(device), rounds, product) for device in devices]
    else:
        found = _test_ranks(on_cuda, rounds, timeout, product, sent)
    wrong = verdict(found)
    if int(os.environ.get("RANK", 0)) == 0:
        print(page(found, wrong), flush=True)
    return 1 if wrong else 0


def _test(device: torch.device, rounds: int, product: Product) -> Found:
    tested = try_products(device, rounds, product)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU
    rank = f"rank {os.environ['RANK']}, " if launched_devices() else ""
    return Found(f"{rank}{socket.gethostname()}, {device}", kind, tested.hash, tested.tflops, tested.problems)


def _test_ranks(on_cuda: bool, rounds: int, timeout: float, product: Product, sent: Send) -> list[Found]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    own = _test(device, rounds, product)
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timedelta(seconds=timeout))
    try:
        own.links = try_links(device, sent=sent)
        gathered = gather_objects(own)
    finally:
        if begun:
            dist.destroy_process_group()
    return gathered
