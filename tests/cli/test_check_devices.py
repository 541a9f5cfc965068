"""`lit-stable check-devices` in one process; on two ranks in tests/distributed/test_operations_two_ranks.py."""

from __future__ import annotations

import pytest
import torch
from tiny_recipe import command

from lit_stable.devices.check_devices import check_devices


@pytest.mark.parametrize("words", [("check-devices",), ("check", "--devices")], ids=" ".join)
def test_the_cpu_is_well(words: tuple[str, ...]) -> None:
    done = command(*words, "--rounds", "2", "--accelerator", "cpu")
    assert done.code == 0
    assert done.out.endswith("\n1 device, all well\n")


def test_a_fault_is_told_and_is_the_exit_code(capsys) -> None:
    assert check_devices(2, accelerator="cpu", product=lambda a, b: a @ b + 1) == 1
    assert "cpu: 2 of 2 float32 products were wrong, in up to 65536 elements" in capsys.readouterr().out


def test_what_cannot_be_is_refused() -> None:
    done = command("check-devices", "--rounds", "1")
    assert (done.code, done.err) == (2, "lit-stable check-devices: rounds=1: must be at least 2.\n")
    if not torch.cuda.is_available():
        done = command("check-devices", "--accelerator", "cuda")
        assert (done.code, "sees no CUDA device" in done.err) == (2, True)
