"""A forward pass that a run does not notice: no gradients, no draws, no compiled code, everything left as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import nn

from .private_fsdp_names import reshard_fsdp1
from .shards import has_fsdp1

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_UNCOMPILED = ContextVar("uncompiled", default=False)


@contextmanager
def extra_forward(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Within it the network may be called, by all ranks alike, and the run stays bit-identical to one without.

    - Modules are in evaluation mode (each one's own flag is put back): dropout is off, batch norms learn nothing.
    - All generators (torch on CPU and on the module's device, ``random``, NumPy) are put back.
    - Precision is that of training; compiled code is passed by (``force_eager``), so hooks on modules inside of it are
      called and nothing is compiled for shapes that training never sees.
    - Sharded modules are called in the order that their hooks ask for, on every rank, and resharded afterwards: the
      roots of ``fully_shard`` and of FSDP1 stay gathered after a forward pass, for a backward pass that never comes
      here, and would keep the weights from before the next step.

    A module that changes itself in a forward pass in evaluation mode is beyond this.
    """
    with ExitStack() as stack:
        stack.callback(reshard, trainer.strategy.model or module)
        stack.enter_context(torch.no_grad())
        stack.enter_context(undisturbed_generators(module.device))
        stack.enter_context(trainer.precision_plugin.forward_context())
        stack.enter_context(uncompiled())
        stack.enter_context(evaluating(module))
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within it nothing is compiled, and compiled code runs as it was written."""
    token = _UNCOMPILED.set(True)
    try:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled here, and the import takes a second
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _UNCOMPILED.reset(token)


def is_uncompiled() -> bool:
    """Whether this is inside of :func:`uncompiled`: a kernel that exists as compiled code only is not to be had."""
    return _UNCOMPILED.get()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within it all of a module is in evaluation mode; each part is put back into its own."""
    flags = [(m, m.training) for m in module.modules()]
    try:
        for m, _ in flags:
            m.training = False
        yield
    finally:
        for m, training in flags:
            m.training = training


def through_root(trainer: Trainer, module: LightningModule, function: Callable[[], None]) -> None:
    """Call a function that calls the network; under FSDP1 from inside of the root, which gathers its own parameters."""
    root = trainer.strategy.model
    if not has_fsdp1(root) or root is module:
        function()
        return
    module.forward = function  # type: ignore[method-assign]
    try:
        assert root is not None
        root()
    finally:
        del module.forward


def reshard(model: nn.Module) -> None:
    """Free all parameters that ``fully_shard`` or FSDP1 has gathered, if any.

    Args:
        model: As the strategy holds it, since FSDP1 wraps the LightningModule.
    """
    if has_fsdp1(model):
        reshard_fsdp1(model)
    for part in model.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(part).__mro__):
            part.reshard()  # type: ignore[operator]


@contextmanager
def undisturbed_generators(device: torch.device) -> Iterator[None]:
    """Whatever is drawn within, the generators of the process come out as they went in. No wait for the device."""
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    python_state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy_random is not None:
                numpy_random.set_state(numpy_state)
