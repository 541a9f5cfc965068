"""How large activations are, by what they are and where: they surge many steps before the loss does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .base import MisconfigurationException
from .forward_replay import ForwardReplay
from .monitor import Monitor
from .parameter_places import layer_of_module
from .rank_gather import gather_ranks
from .scalars import Scalars
from .shards import local
from .wrapper_names import unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_Output = tuple[Tensor, Tensor, int]  # of one output: L2 norm and largest magnitude, 0-d fp32, and elements

#: Role -> shell patterns for module names (``*`` spans dots). ``qkv`` is cut into its three parts where that is
#: possible; ``residual`` are layers, so modules whose name ends in a number.
ROLES: dict[str, tuple[str, ...]] = {
    "q": ("*.q_proj", "*.q", "*.query", "*.wq"),
    "k": ("*.k_proj", "*.k", "*.key", "*.wk"),
    "v": ("*.v_proj", "*.v", "*.value", "*.wv"),
    "qkv": ("*.qkv", "*.c_attn", "*.query_key_value", "*.qkv_proj", "*.Wqkv"),
    "o": ("*attention.out", "*attn.c_proj", "*.o_proj", "*attention.dense", "*.out_proj", "*.wo"),
    "gate": ("*.gate", "*.gate_proj"),
    "fc1": ("*mlp.up", "*.c_fc", "*.up_proj", "*.fc1", "*.dense_h_to_4h"),
    "fc2": ("*mlp.down", "*mlp.c_proj", "*.down_proj", "*.fc2", "*.dense_4h_to_h"),
    "residual": ("*blocks.*", "*.h.*", "*layers.*", "*.layer.*"),
}


class ActivationMonitor(Monitor):
    """Log root mean square and largest absolute value of what each part of each layer puts out.

    Parts are queries, keys, values, the attention's output projection, both MLP projections, and the residual stream
    after the layer. In the vision-language run of Hugging Face's team the MLP's and the attention's output projections
    of the first layers surged first and most; in OPT-175B's the norm of the last layer's activations told which
    checkpoint was still healthy.

    They are seen in a second forward pass of the last micro-batch on measured steps, without dropout: see
    ``ForwardReplay``, which this installs. Mean and maximum are over the micro-batches of all ranks, and over the parts
    that tensor-parallel ranks hold. One collective per measurement.

    Modules are found by name. A fused projection is logged as ``qkv``, unless its parent has a method
    ``split_qkv(output) -> (q, k, v)``, or it is GPT-2's ``c_attn``, whose thirds are known.

    Logged: ``stability/activation_rms/LAYER.ROLE`` and ``stability/activation_max/LAYER.ROLE``, LAYER
    being a module's name up to its number, ROLE one of q, k, v, qkv, o, gate, fc1, fc2, residual, or of ``modules``.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step. One costs about a third of a micro-batch.
        modules: Roles of your own, with shell patterns for module names; they stand before those above, and a role of
            the same name replaces one: ``{router: ["*.gate.proj"], residual: []}``.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when no module's name matches.

    Example::

        >>> Trainer(callbacks=[ActivationMonitor(every_steps=100)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, modules: dict[str, list[str]] | None = None) -> None:
        super().__init__(every_steps)
        self.modules = modules
        own = modules or {}
        self._roles: dict[str, Sequence[str]] = {**own, **{r: p for r, p in ROLES.items() if r not in own}}
        self._found: list[tuple[str, nn.Module, Callable[[Tensor], Sequence[Tensor]] | None]] = []
        self._seen: dict[str, list[_Output]] = {}  # by LAYER.ROLE

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            ForwardReplay.of(trainer).watch(self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        modules = {unwrapped(name): module for name, module in pl_module.named_modules()}
        self._found = []
        for name, module in modules.items():
            role = next((r for r, patterns in self._roles.items() if _matches(name, r, patterns)), None)
            if role is not None:
                parent = modules.get(name.rpartition(".")[0])
                self._found.append((f"{layer_of_module(name)}.{role}", module, _splitter(name, role, parent)))
        if not self._found:
            raise MisconfigurationException(
                f"`ActivationMonitor`: no module of {type(pl_module).__name__} has a name that it knows"
                f" ({', '.join(list(modules)[1:4])}, ...); say which are which, as modules={{fc1: ['*.first']}}."
            )

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Hooks on the modules found."""
        self._seen = {}
        handles = [m.register_forward_hook(self._hook(key, split)) for key, m, split in self._found]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, key: str, split: Callable[[Tensor], Sequence[Tensor]] | None) -> Callable[..., None]:
        def measure(module: nn.Module, args: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None or not tensor.is_floating_point():
                return
            if split is None:
                self._take(key, tensor)
                return
            for role, part in zip("qkv", split(tensor), strict=True):
                self._take(f"{key.removesuffix('qkv')}{role}", part)

        return measure

    def _take(self, key: str, tensor: Tensor) -> None:
        piece = local(tensor)
        norm = torch.linalg.vector_norm(piece, dtype=torch.float32)
        largest = torch.linalg.vector_norm(piece, torch.inf, dtype=torch.float32)
        self._seen.setdefault(key, []).append((norm, largest, piece.numel()))

    def seen(self, trainer: Trainer) -> None:
        """Combine the ranks and pass on."""
        if not self._seen:
            return
        keys = list(self._seen)
        ranks = gather_ranks(_sums(list(self._seen.values())))  # (world, n, 3)
        squares, counts = ranks[..., 0].sum(0), ranks[..., 1].sum(0)
        scalars = Scalars.of(trainer)
        scalars.add([f"stability/activation_rms/{key}" for key in keys], (squares / counts).sqrt())
        scalars.add([f"stability/activation_max/{key}" for key in keys], ranks[..., 2].amax(0))
        self._seen = {}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._found, self._seen = [], {}


def _sums(seen: Sequence[Sequence[_Output]]) -> Tensor:
    """(n, 3) fp64: sum of squares, elements and largest of each part's outputs."""
    # A few kernels for all parts together: some for each took longer to launch than to measure.
    norms, largest, _ = zip(*(output for outputs in seen for output in outputs), strict=True)
    rows = torch.stack([torch.stack(norms).double().square(), torch.stack(largest).double()], 1)  # (outputs, 2)
    sizes = [len(outputs) for outputs in seen]
    if max(sizes) > 1:  # a module that is called several times
        rows = torch.stack([torch.stack([own[:, 0].sum(), own[:, 1].amax()]) for own in torch.split(rows, sizes)])
    counts = torch.tensor([float(sum(count for *_, count in outputs)) for outputs in seen], dtype=torch.float64)
    # Unpinned, the copy would wait for the device.
    counts = counts.pin_memory().to(rows.device, non_blocking=True) if rows.is_cuda else counts.to(rows.device)
    return torch.stack([rows[:, 0], counts, rows[:, 1]], 1)


def first_tensor(output: Any) -> Tensor | None:
    """A module's output, or the first tensor of the tuple, mapping or object with ``logits`` that it returns."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((t for t in map(first_tensor, output) if t is not None), None)
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _matches(name: str, role: str, patterns: Sequence[str]) -> bool:
    if role == "residual" and not name.rpartition(".")[2].isdigit():
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _splitter(name: str, role: str, parent: nn.Module | None) -> Callable[[Tensor], Sequence[Tensor]] | None:
    if role != "qkv":
        return None
    own = getattr(parent, "split_qkv", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    return (lambda output: output.chunk(3, dim=-1)) if name.endswith("c_attn") else None
