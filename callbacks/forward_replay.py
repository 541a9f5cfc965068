"""The forward pass of a micro-batch once more, watched from inside, for all who want to see activations."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from .base import StabilityCallback, find_or_install, rank_zero_warn
from .extra_forward import extra_forward, through_root
from .network_calls import NetworkCalls

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Observer(Protocol):
    """Who wants to see a forward pass."""

    def is_due(self, trainer: Trainer) -> bool:
        """Whether it wants to see one of the step now under way; the same on all ranks."""

    def watching(self, module: LightningModule) -> AbstractContextManager[None]:
        """Hooks are on within it, and nowhere else."""

    def seen(self, trainer: Trainer) -> None:
        """Called after the pass."""


class ForwardReplay(StabilityCallback):
    """On steps that somebody measures, run the network a second time on the last micro-batch, with hooks on.

    Hooks in the pass that trains would be paid for in every step, are not called inside compiled code, and see each
    layer twice where activations are recomputed. So the pass that trains is left alone: of its last micro-batch only
    the arguments are kept with which the LightningModule's direct children were called, and just before the optimizer
    step those calls are made again, with the weights that gave the gradients, without dropout, without gradients and
    without compiled code; see :func:`extra_forward`. All observers share one pass. It costs about a third of one
    micro-batch, on measured steps; on others it costs nothing.

    Works with any LightningModule whose network is one of its attributes, under one device, DDP, FSDP2, tensor
    parallelism, and FSDP1. A network called from inside compiled code as a whole (``torch.compile`` of the
    LightningModule itself) is not seen; that is warned of once. It installs itself: ``ForwardReplay.of(trainer)``.

    Nothing is logged of its own.

    Attributes:
        batch: The last micro-batch of the window, while its step is being measured.

    Example::

        >>> ForwardReplay.of(trainer).watch(observer)  # doctest: +SKIP
    """

    order: ClassVar[int] = 49

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self.batch: Any = None
        self._calls = NetworkCalls()
        self._warned = False

    @staticmethod
    def of(trainer: Trainer) -> ForwardReplay:
        """The trainer's instance, installed if it has none yet."""
        return find_or_install(trainer, ForwardReplay)

    def watch(self, observer: Observer) -> None:
        """Let it see the steps that it wants to see, until the fit ends; called in ``setup``."""
        if observer not in self._observers:
            self._observers.append(observer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._release()
        if any(observer.is_due(trainer) for observer in self._observers):
            self.batch = batch
            self._calls.listen(pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._calls.silence()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        due = [observer for observer in self._observers if observer.is_due(trainer)]
        if not due or self.batch is None:
            return
        self._calls.silence()
        if not self._calls.made and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{type(pl_module).__name__}: no call of its network was seen in training_step, so no activation can be"
                " measured; call an attribute that is a module, outside of compiled code."
            )
        elif self._calls.made:
            with extra_forward(trainer, pl_module), ExitStack() as stack:
                for observer in due:
                    stack.enter_context(observer.watching(pl_module))
                through_root(trainer, pl_module, self._call_again)
            for observer in due:
                observer.seen(trainer)
        self._release()

    def _call_again(self) -> None:
        for module, args, kwargs in self._calls.made:
            module(*args, **kwargs)

    def _release(self) -> None:
        self._calls.release()
        self.batch = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()
        self._observers = []
