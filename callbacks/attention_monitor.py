"""The largest attention logit of every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attention_logits import AttentionCalls, ShowsQueriesKeys, largest_logit
from .base import rank_zero_warn
from .forward_replay import ForwardReplay
from .module_patterns import unwrapped
from .monitor import Monitor
from .rank_gather import gather_ranks
from .scalars import Scalars
from .shards import local

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AttentionMonitor(Monitor):
    """Log the largest attention logit of each attention module: over heads, positions, samples and ranks.

    A logit is a query times a key times the factor, as the softmax gets it: after norms of queries and keys and rotary
    phases, with an additive mask, before a soft cap. Where logits grow without bound the softmax collapses on one
    position and gradients vanish or explode (Dehghani et al. 2023, arXiv:2302.05442, section 3.2; Zhai et al. 2023,
    arXiv:2303.06296); the loss shows it late. Fused kernels never show the logits, so products are taken once more, in
    fp32, on measured steps, in the pass of ``ForwardReplay`` (last micro-batch, no dropout), which this installs.

    Queries and keys are those of every call of ``scaled_dot_product_attention``, so models need not be prepared. A
    module that goes another way shows them in a method ``queries_keys``; see ``ShowsQueriesKeys``
    (``attention_logits.py``). ``torch.nn.MultiheadAttention`` does neither. One collective per measurement.

    Logged: ``stability/attention_logit_max/NAME``, NAME being the module that attends, and
    ``stability/attention_logit_max`` alone, the largest of them. Minus infinity: nothing attended to anything.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step. One costs about a third of a micro-batch, shared with ``ActivationMonitor``, and the
            products of queries and keys in fp32.

    Example::

        >>> Trainer(callbacks=[AttentionMonitor(every_steps=100)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None) -> None:
        super().__init__(every_steps)
        self._stack: list[str] = []  # names of the modules that are being called, outermost first
        self._shows: set[str] = set()  # of those, which show queries and keys themselves
        self._largest: dict[str, Tensor] = {}
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            ForwardReplay.of(trainer).watch(self)

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Follow which module is being called, and note every attention."""
        self._stack, self._largest = [], {}
        modules = {unwrapped(name): m for name, m in module.named_modules() if name}
        self._shows = {name for name, m in modules.items() if isinstance(m, ShowsQueriesKeys)}
        with ExitStack() as stack:
            for name, m in modules.items():
                for handle in (
                    m.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                    m.register_forward_hook(self._leave, always_call=True),
                ):
                    stack.callback(handle.remove)
            stack.enter_context(AttentionCalls(self._note))
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append(name)
        if name in self._shows:
            assert isinstance(module, ShowsQueriesKeys)
            q, k, scale, *mask = module.queries_keys(*args, **kwargs)
            self._keep(name, largest_logit(local(q), local(k), scale, True, *mask))

    def _leave(self, *ignored: Any) -> None:
        self._stack.pop()

    # Tensor-parallel ranks hold whole heads, so that pieces will do.
    def _note(self, q: Tensor, k: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None) -> None:
        if not self._shows.intersection(self._stack):
            name = self._stack[-1] if self._stack else "attention"
            self._keep(name, largest_logit(local(q), local(k), scale, is_causal, mask))

    def _keep(self, name: str, value: Tensor) -> None:
        self._largest[name] = torch.maximum(self._largest[name], value) if name in self._largest else value

    def seen(self, trainer: Trainer) -> None:
        """Combine the ranks and pass on."""
        if not self._largest:
            if not self._warned:
                rank_zero_warn(
                    "`AttentionMonitor`: no call of scaled_dot_product_attention and no module with queries_keys was"
                    " seen; give the attention module that method."
                )
            self._warned = True
            return
        names = list(self._largest)
        largest = gather_ranks(torch.stack(list(self._largest.values()))).amax(0)  # (n,)
        keys = [f"stability/attention_logit_max/{name}" for name in names]
        Scalars.of(trainer).add([*keys, "stability/attention_logit_max"], torch.cat([largest, largest.amax()[None]]))
        self._largest = {}
