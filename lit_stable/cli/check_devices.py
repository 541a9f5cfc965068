"""`lit-stable check-devices`: does every device multiply right, and does what ranks send each other arrive."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser


def run_check_devices(argv: Sequence[str]) -> int:
    """Parse the arguments of ``check-devices`` and print the page; 1 where a device is bad."""
    parser = ArgumentParser(
        prog="lit-stable check-devices",
        description="Test every GPU of this process, or under torchrun the one of each rank and what they send each"
        " other: torchrun --standalone --nproc-per-node 8 -m lit_stable check-devices",
    )
    parser.add_argument("--rounds", type=int, default=20, help="How often each product is taken, >= 2.")
    parser.add_argument("--timeout", type=float, default=120.0, help="Seconds that a rank waits for another.")
    parser.add_argument("--accelerator", type=str, default="auto", help="auto, cuda or cpu.")
    arguments = parser.parse_args(list(argv))
    if arguments.rounds < 2:
        raise ValueError(f"rounds={arguments.rounds}: must be at least 2.")

    from lit_stable.devices.check_devices import check_devices  # late: it takes seconds

    return check_devices(arguments.rounds, arguments.timeout, arguments.accelerator)
