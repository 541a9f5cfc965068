"""Keep attention logits from growing: scale down the queries and keys of a head whose largest logit is too large."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .attention_watch import AttentionWatch
from .base import MisconfigurationException, StabilityCallback, is_logging_step, refuse_all
from .forward_replay import ForwardReplay
from .moved_parameters import Moved, all_moved, moved_by
from .private_optimizer_names import after_step_first
from .progress import Progress
from .qk_scaling import ScalesQueriesKeys, head_factors, normalises, rows_to_scale, scale_rows, split_factors
from .shards import has_fsdp1
from .step_hooks import require_step_hooks
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class QKClip(StabilityCallback):
    """Right after a step, multiply the query and key weights of every head whose largest logit passed ``threshold``.

    Logits that grow without bound end in a softmax on one position (see :class:`~.attention_monitor.AttentionMonitor`).
    With gamma = min(1, threshold / largest logit), by head, queries and keys are multiplied by the root of gamma each,
    so that the head's logits shrink to the threshold and nothing else changes. Heads below it keep every bit. Where
    several query heads share a key head (GQA), the key head takes the root of the smallest gamma among them and each
    query head the rest, so that heads below the threshold keep their logits. Biases are scaled with their rows. The
    moments of the optimizer are left alone, as in the source.

    What a step leaves as it is, stays: nothing is scaled in a step that is skipped, by another callback or a gradient
    scaler (the logits of a batch that was condemned say nothing), at learning rate 0, or where a query or key parameter
    of the module is frozen, since queries and keys are scaled together or not at all.

    The largest logit is over samples of the step's last micro-batch, all positions and all ranks, measured in fp32 in
    the pass of ``ForwardReplay`` with the weights that gave the gradients. That pass costs about a third of a
    micro-batch, and the products of queries and keys; ``every_steps`` spreads it. No step waits for the device.

    It knows modules with ``q_proj`` and ``k_proj``, such as Llama's, and those that say what their rows are; see
    ``ScalesQueriesKeys`` (``qk_scaling.py``). Weights may be sharded by FSDP2 and tensor parallelism.

    Nothing is to be restored but the count: a resume measures the same and clips the same.

    Logged at logging steps: ``stability/qk_logit_max`` (the largest of all heads when last measured) and
    ``stability/qk_clipped_heads`` (heads scaled down since the run began, one that is scaled twice counted twice).

    Source: QK-Clip of MuonClip, Kimi K2 (Kimi Team 2025, arXiv:2507.20534, section 2.1).

    Args:
        threshold: Largest logit that a head may keep, > 0. Kimi K2: 100.
        every_steps: Optimizer steps between measurements, >= 1.
        action: ``act``, or ``log``: the same numbers, and no weight is touched.

    Raises:
        MisconfigurationException: when an argument is out of range; when queries or keys are normalised, so that
            scaling their projections does nothing; when no module is of a known kind; under FSDP1.

    Example::

        >>> Trainer(callbacks=[QKClip(threshold=100.0)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 50  # after the pass that it watches

    def __init__(self, threshold: float = 100.0, every_steps: int = 1, action: Literal["act", "log"] = "act") -> None:
        problems = []
        if not (threshold > 0 and math.isfinite(threshold)):
            problems.append(f"`QKClip(threshold={threshold})`: must be a finite number above 0.")
        if every_steps < 1:
            problems.append(f"`QKClip(every_steps={every_steps})`: must be at least 1.")
        refuse_all(problems)
        self.threshold, self.every_steps, self.action = threshold, every_steps, action
        self._watch = AttentionWatch()
        self._modules: dict[str, nn.Module] = {}
        self._factors: dict[str, Tensor] = {}  # of heads (H,), until the step has been taken
        self._moved: dict[nn.Parameter, Moved] = {}  # likewise
        self._has_stepped = False
        self._clipped: int | Tensor = 0
        self._only_logged: int | Tensor = 0
        self._largest: Tensor | None = None
        self._handles: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            ForwardReplay.of(trainer).watch(self)
            Progress.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if has_fsdp1(trainer.strategy.model):
            raise MisconfigurationException(
                "`QKClip`: FSDP1 flattens the rows that belong to a head; take strategy fsdp2, or leave it out."
            )
        self._modules = {unwrapped(name): module for name, module in pl_module.named_modules() if name}
        _refuse(self._modules)
        self._factors = {}
        for optimizer in trainer.optimizers:
            require_step_hooks(optimizer)
            # Looked at before anything is put back, scaled when `UpdateClip` has taken back what was too much.
            self._handles.append(after_step_first(optimizer, self._look))
            self._handles.append(optimizer.register_step_post_hook(self._scale))

    # -- the pass that is watched ------------------------------------------------------------------------------------

    def is_due(self, trainer: Trainer) -> bool:
        """Whether the step now under way is measured."""
        # Not by `global_step`, which counts each of several optimizers.
        return (Progress.of(trainer).start.steps + 1) % self.every_steps == 0

    def watching(self, module: LightningModule) -> AbstractContextManager[None]:
        """Note every attention."""
        return self._watch.watching(module)

    def seen(self, trainer: Trainer) -> None:
        """Combine the ranks, and keep the factors for when the step has been taken."""
        heads = {name: self._whole(name, largest) for name, largest in self._watch.take().items()}
        if not heads:
            return
        together = torch.cat(list(heads.values()))
        if trainer.world_size > 1:
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
        self._largest = together.amax()
        parts = torch.split(together, [len(part) for part in heads.values()])
        self._factors = {name: head_factors(part, self.threshold) for name, part in zip(heads, parts, strict=True)}

    def _whole(self, name: str, largest: Tensor) -> Tensor:
        """This rank's heads among all (H,): tensor-parallel ranks hold some of them each."""
        module = self._modules[name]
        whole = largest.new_full((int(getattr(module, "n_head", len(largest))),), -math.inf)
        first = int(getattr(module, "first_head", 0))
        whole[first : first + len(largest)] = largest
        return whole

    def _look(self, optimizer: Any, *_: Any) -> None:
        if self._factors:
            self._moved = moved_by(optimizer)

    def _scale(self, *_: Any) -> None:
        """Called after the optimizer's step."""
        (factors, moved), self._factors, self._moved = (self._factors, self._moved), {}, {}
        for name, of_heads in factors.items():
            key_heads, module = _known(name, self._modules[name], len(of_heads))
            scaled = module.rows_of_heads(*split_factors(of_heads, key_heads))
            acts = all_moved((p for layer, _ in scaled for p in layer.parameters(recurse=False)), moved)
            if acts is False:
                continue
            above = ((of_heads < 1) & acts).sum()
            if self.action == "log":
                self._only_logged = self._only_logged + above
                continue
            self._clipped = self._clipped + above
            for layer, rows in scaled:
                scale_rows(layer, torch.where(acts, rows, 1.0) if isinstance(acts, Tensor) else rows)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._has_stepped = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._factors = {}  # a gradient scaler, or the module, may have withheld the step
        if self._has_stepped and self._largest is not None and is_logging_step(trainer):
            pl_module.log("stability/qk_logit_max", self._largest)
            count = self._clipped if self.action == "act" else self._clipped + self._only_logged
            pl_module.log("stability/qk_clipped_heads", torch.as_tensor(count, dtype=torch.float32))
        self._has_stepped = False

    # -- end, state --------------------------------------------------------------------------------------------------

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._modules, self._factors, self._moved, self._largest = [], {}, {}, {}, None
        self._has_stepped = False

    def state_dict(self) -> dict[str, Any]:
        return {"clipped": int(self._clipped), "only_logged": int(self._only_logged)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clipped = int(state_dict["clipped"])
        self._only_logged = int(state_dict.get("only_logged", 0))  # older states do not tell


def _known(name: str, module: nn.Module, heads: int) -> tuple[int, ScalesQueriesKeys]:
    found = rows_to_scale(module, heads)
    if found is None:
        raise MisconfigurationException(
            f"`QKClip`: {name} ({type(module).__name__}) attends, and has neither q_proj and k_proj nor rows_of_heads;"
            " give it that method (see ScalesQueriesKeys)."
        )
    return found


def _refuse(modules: dict[str, nn.Module]) -> None:
    known = {name: module for name, module in modules.items() if rows_to_scale(module, 1) is not None}
    if not known:
        raise MisconfigurationException(
            "`QKClip`: no module has q_proj and k_proj, or rows_of_heads; give the attention module that method (see"
            " ScalesQueriesKeys)."
        )
    for name, module in known.items():
        if normalises(module):
            raise MisconfigurationException(
                f"`QKClip`: {name} normalises queries or keys, which undoes what it does to their projections; leave it"
                " out, or the norm (qk_norm: none)."
            )
