"""Time an optimizer step alone: torch's fused AdamW, bitsandbytes' and torchao's 8-bit ones, and ours.

All step on the same parameters with the same gradients, one after the other in every round, so that whatever the
machine does besides strikes all alike. Run it as a script; it is no test.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lit_stable.callbacks.eight_bit_blocks import require_bitsandbytes
from lit_stable.callbacks.eight_bit_conversion import convert_in_place
from lit_stable.callbacks.eight_bit_layout import StateRules, plan_states
from lit_stable.callbacks.eight_bit_optimizer import StatePlan
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MODELS = {
    "tiny": GPTConfig(vocab_size=2048, n_layer=4, n_head=6, d_model=192, max_length=256),
    "gpt2_124m": GPTConfig(),
    "gpt_1b3": GPTConfig(n_layer=24, n_head=16, d_model=2048, max_length=2048),
}


def torch_fused(model: nn.Module) -> Any:
    """Moments in fp32, one kernel a group."""
    return torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True)


def ours(model: nn.Module, skips: bool = False) -> Any:
    """As `EightBitAdam` converts it; with ``skips``, as a callback sets it that may skip the step on the device."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True)
    device = next(model.parameters()).device
    convert_in_place(optimizer, StatePlan(plan_states(model, StateRules()), "dynamic", converts=False), device)
    if skips:
        optimizer.found_inf = torch.zeros((), device=device)
    return optimizer


def bitsandbytes_8bit(model: nn.Module) -> Any:
    """bitsandbytes' own: every tensor above 4096 elements in 8 bit but the embeddings; it waits after each of them."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.override_config(module.weight, "optim_bits", 32)
    return bitsandbytes.optim.AdamW8bit(model.parameters(), **OPTIONS)


def torchao_8bit(model: nn.Module) -> Any:
    """torchao's own, compiled: every tensor above 4096 elements in 8 bit, embeddings too."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), **OPTIONS)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch AdamW, fused, fp32 moments": torch_fused,
    "EightBitAdam": ours,
    "EightBitAdam, with a skip in the kernel": lambda model: ours(model, skips=True),
    "bitsandbytes AdamW8bit": bitsandbytes_8bit,
    "torchao AdamW8bit": torchao_8bit,
}


def model_with_gradients(config: GPTConfig, device: torch.device) -> nn.Module:
    with torch.device(device):
        model = GPT(config)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator, device=device)
    return model


class Contender:
    """One optimizer, its state and its times."""

    def __init__(self, make: Callable[[nn.Module], Any], model: nn.Module) -> None:
        self.device = next(model.parameters()).device
        before = allocated(self.device)
        self.optimizer = make(model)
        self.step()
        self.state_bytes = allocated(self.device) - before
        self.milliseconds: list[float] = []

    def step(self) -> float:
        """Milliseconds of one step, from an idle device to an idle device."""
        wait(self.device)
        start = time.perf_counter()
        self.optimizer.step()
        wait(self.device)
        return 1e3 * (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def contenders(model: nn.Module) -> dict[str, Contender]:
    """Those that can be built here; what is missing is said."""
    found = {}
    for name, make in OPTIMIZERS.items():
        try:
            found[name] = Contender(make, model)
        except ImportError as error:
            print(f"{name}: left out ({error})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt_1b3" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each optimizer that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="rounds before those")
    arguments = parser.parse_args()
    require_bitsandbytes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    model = model_with_gradients(MODELS[arguments.model], device)
    found = contenders(model)
    for number in range(arguments.warmup + arguments.rounds):
        for contender in found.values():
            taken = contender.step()
            if number >= arguments.warmup:
                contender.milliseconds.append(taken)
    size = sum(p.numel() for p in model.parameters())
    print(f"{card}, torch {torch.__version__}, {arguments.model}: {size:,} parameters, {arguments.rounds} rounds")
    print("| Optimizer | ms, median | ms, range | ratio to the first | state, bytes per parameter |")
    print("|---|--:|--:|--:|--:|")
    first = statistics.median(next(iter(found.values())).milliseconds)
    for name, contender in found.items():
        median, taken = statistics.median(contender.milliseconds), contender.milliseconds
        held = f"{contender.state_bytes / size:.2f}" if device.type == "cuda" else "not measured"
        print(f"| {name} | {median:.2f} | {min(taken):.2f}-{max(taken):.2f} | {median / first:.2f} | {held} |")


if __name__ == "__main__":
    main()
