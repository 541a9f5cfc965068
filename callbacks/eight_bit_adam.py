"""Adam with moments in 8 bit, under every way of sharding that keeps parameters apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .base import (
    MisconfigurationException,
    StabilityCallback,
    find_or_install,
    is_logging_step,
    log_number,
    rank_zero_info,
)
from .eight_bit_blocks import StateMap, require_bitsandbytes, rows_of
from .eight_bit_conversion import convert_in_place, convertible
from .eight_bit_layout import Bits, StateRules, plan_states, state_table
from .eight_bit_optimizer import StatePlan, is_blockwise
from .eight_bit_states import state_bytes
from .private_optimizer_names import is_mock_optimizer
from .safe_checkpoints import SafeCheckpoints
from .shards import has_fsdp1

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class EightBitAdam(StabilityCallback):
    """Keep the moments of Adam or AdamW in 8 bit: 2.03 bytes per parameter of a matrix instead of 8.

    The optimizer that ``configure_optimizers`` returns is converted in place: the same object with the same groups,
    rates, step hooks and scheduler. It then steps on each rank's own shards: single device, DDP, FSDP2 (hybrid too)
    and tensor parallelism, on CPUs and GPUs, with fp32, bf16 and fp16 weights and under a gradient scaler. The
    arithmetic is that of torch's fused kernel, in fp32; so the optimizer counts as fused from then on, ``GradClip`` and
    ``GradSpikeSkip`` act in the kernel, a step that is skipped changes no bit, and no step waits for the device. From
    step to step bitsandbytes keeps each moment as 8-bit codes, 256 of which share a maximum.

    The second moment of an element whose gradients are below 4e-4 of the largest in its block is quantized to zero. If
    the first moment is not, the second is read as the largest value that is quantized to zero, so that no weight moves
    further than with fp32 moments. bitsandbytes' own step reads zero: once such a gradient vanishes, the weight moves
    by thousands of learning rates.

    Whether a tensor is kept in 8 or 32 bit follows from its whole shape and the module that owns it, never from the
    shard, and blocks never cross a row: weights, codes and maxima are the same on any number of ranks. In 32 bit stay
    embeddings (a head tied to one, too), norms, biases and vectors, tensors below ``min_8bit_size``, those with rows so
    short (fewer than 4 elements) that maxima would outweigh the saving, and what ``keep_32_bit`` names. A table at the
    start says what is kept how. GPT-2 small saves 51 % by it, not the 75 % of its other tensors.

    Checkpoints, in one file or sharded, hold codes and maxima and reshard to any number of ranks. One of a run with
    moments in the other form (plain AdamW; other rules; ``state_map``) is refused in a sentence, or converted. To go
    back to 32 bit: ``bits=32, on_load="convert"``; what that run saves a plain AdamW reads.

    It adds ``SafeCheckpoints`` where there is none. After the fit the optimizer stays as it is.

    Logged at logging steps: ``stability/state_bytes_per_parameter``, measured over all shards: 8 with 32-bit moments.

    Source: Dettmers et al. 2022, arXiv:2110.02861 (block-wise quantization, dynamic map, embeddings in 32 bit).

    Args:
        bits: ``8``; or ``32``, to go back: all moments in fp32.
        min_8bit_size: Elements below which a tensor's moments stay in 32 bit, >= 1.
        embedding_bits: Of embeddings, by the modules as they are when the optimizer exists.
        keep_32_bit: Shell patterns of module names, such as ``head`` or ``blocks.0.*``; ``*`` spans dots.
        state_map: The 256 values that codes stand for: ``dynamic``, finer near zero; ``linear``, evenly spaced, which
            quantizes second moments below 1/500 of the block's largest to zero.
        on_load: What becomes of a checkpoint in another form: ``refuse`` or ``convert``.

    Arguments are keyword-only. An optimizer that the module keeps for a second fit keeps its moments; those whose bits
    or map the new callback changes are converted.

    Raises:
        MisconfigurationException: when an argument is out of range; when bitsandbytes is missing or older than 0.46;
            under FSDP1, DeepSpeed and CPU offload; when there is no ``torch.optim.Adam`` or ``AdamW``; for one with
            ``amsgrad`` or ``differentiable``, fp64 parameters, or sparse gradients; for a checkpoint in another form.

    Example::

        >>> Trainer(callbacks=[EightBitAdam()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 5

    def __init__(
        self,
        *,
        bits: Bits = 8,
        min_8bit_size: int = 4096,
        embedding_bits: Bits = 32,
        keep_32_bit: Sequence[str] | None = None,
        state_map: StateMap = "dynamic",
        on_load: Literal["refuse", "convert"] = "refuse",
    ) -> None:
        if not isinstance(min_8bit_size, int) or isinstance(min_8bit_size, bool) or min_8bit_size < 1:
            raise MisconfigurationException(
                f"`EightBitAdam(min_8bit_size={min_8bit_size!r})`: must be a whole number of elements, 1 or more."
            )
        patterns = () if keep_32_bit is None else keep_32_bit
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
            raise MisconfigurationException(
                f"`EightBitAdam(keep_32_bit={keep_32_bit!r})`: must be a list of patterns for module names, as"
                " ['head', 'blocks.0.*']."
            )
        self.bits, self.min_8bit_size, self.embedding_bits = bits, min_8bit_size, embedding_bits
        self.keep_32_bit = tuple(patterns)
        self.state_map, self.on_load = state_map, on_load
        self._strategy: Any = None
        self._converted: list[Any] = []

    @property
    def rules(self) -> StateRules:
        """What decides between 8 and 32 bit."""
        return StateRules(self.bits, self.min_8bit_size, self.embedding_bits, self.keep_32_bit)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_strategy(trainer)
        require_bitsandbytes()
        # It prepares the state for what a sharded checkpoint holds. Its own setup, as it may have come too late for it.
        find_or_install(trainer, SafeCheckpoints).setup(trainer, pl_module, stage)
        # On the instance: after this method optimizers and schedulers exist, and nothing has been loaded into them yet,
        # whatever the strategy.
        strategy: Any = trainer.strategy
        strategy.setup_optimizers = self._converting(trainer, strategy.setup_optimizers)
        self._strategy = strategy

    def _converting(self, trainer: Trainer, setup_optimizers: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
        def setup_then_convert(own: Trainer) -> None:
            setup_optimizers(own)
            self._convert(trainer)

        return setup_then_convert

    def _convert(self, trainer: Trainer) -> None:
        strategy, module = trainer.strategy, trainer.lightning_module
        if has_fsdp1(strategy.model):
            raise MisconfigurationException(FSDP1)
        ours = [optimizer for optimizer in strategy.optimizers if convertible(optimizer)]
        others = [type(optimizer).__name__ for optimizer in strategy.optimizers if not convertible(optimizer)]
        if not ours:
            has_none = not strategy.optimizers or is_mock_optimizer(strategy.optimizers[0])
            raise MisconfigurationException(
                f"`{type(module).__name__}.configure_optimizers` returns"
                f" {'no optimizer, so nothing would be trained' if has_none else ', '.join(others)}:"
                " `EightBitAdam` takes torch.optim.Adam or AdamW, and none derived from them."
            )
        tensors = plan_states(module, self.rules)
        plan = StatePlan(tensors, self.state_map, self.on_load == "convert")
        for optimizer in ours:
            convert_in_place(optimizer, plan, strategy.root_device)
        strategy.optimizers = strategy.optimizers  # Lightning's wrappers imitate the class that they find
        self._converted = ours
        held = [p for optimizer in ours for group in optimizer.param_groups for p in group["params"]]
        cut = sum(tensors[p].bits == 8 and rows_of(p).group is not None for p in held if p in tensors)
        notes = [f"{cut} tensors with blocks cut between ranks, which agree on their maxima"] if cut else []
        notes += [f"{', '.join(others)} stays as it is"] if others else []
        table = state_table(tensors[p] for p in held if p in tensors)
        rank_zero_info("; ".join([f"EightBitAdam, {self.state_map} map", *notes]) + f"\n{table}")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if is_logging_step(trainer):
            states = [state for own in trainer.optimizers if is_blockwise(own) for state in own.state.values()]
            parameters = sum(p.numel() for own in trainer.optimizers if is_blockwise(own) for p in own.state)
            log_number(pl_module, "stability/state_bytes_per_parameter", state_bytes(states) / max(1, parameters))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._strategy is not None:
            self._strategy.__dict__.pop("setup_optimizers", None)
        for optimizer in self._converted:
            optimizer.__dict__.pop("plan", None)
        self._strategy, self._converted = None, []


FSDP1 = (
    "`EightBitAdam`: FSDP1 flattens parameters together and its optimizer-state gather knows no codes; use strategy"
    " fsdp2 (ModelParallelStrategy with fully_shard)."
)


def refuse_strategy(trainer: Trainer) -> None:
    """Raise under strategies that do not leave parameters apart, or bring an optimizer of their own."""
    # By name: isinstance() is False across `lightning.pytorch` and `pytorch_lightning`.
    names = {t.__name__ for t in type(trainer.strategy).__mro__}
    if "FSDPStrategy" in names:
        raise MisconfigurationException(FSDP1)
    if "DeepSpeedStrategy" in names:
        raise MisconfigurationException(
            "`EightBitAdam`: DeepSpeed brings an optimizer of its own, which cannot be converted; use strategy fsdp2 or"
            " ddp."
        )
