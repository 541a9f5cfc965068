"""What of a block is kept for its backward pass: the numbers are the same, the memory is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_fit import assert_same_bits

from lit_stable.model.config import GPTConfig
from lit_stable.model.recompute import Recompute, refuse_recompute
from lit_stable.model.sharding import build_gpt

D, TOKENS, LAYERS = 64, 2 * 32, 3


def step(recompute: Recompute, **fields: Any) -> tuple[list[torch.Tensor], int]:
    """(loss and gradients of one step, elements of activations that blocks keep for the backward pass)."""
    config = GPTConfig(vocab_size=50, n_layer=LAYERS, n_head=4, d_model=D, max_length=32, **fields)
    gpt = build_gpt(config, seed=0, device=torch.device("cpu"), recompute=recompute)
    weights = {p.data_ptr() for p in gpt.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    torch.manual_seed(0)
    ids = torch.randint(50, (2, 32))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = gpt(ids).float().square().mean()
    loss.backward()
    size = sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values())
    return [loss.detach(), *(p.grad for p in gpt.parameters() if p.grad is not None)], size


@pytest.mark.parametrize(
    "fields", [{}, {"mlp": "swiglu", "norm": "rmsnorm", "n_kv_head": 1}, {"dropout": 0.2}], ids=str
)
def test_every_gradient_is_the_same_to_the_bit(fields: dict[str, Any]) -> None:
    plain, *others = (step(how, **fields)[0] for how in (False, True, "selective"))
    for other in others:
        assert_same_bits(other, plain)


def test_selective_keeps_more_than_inputs_and_less_than_all() -> None:
    """Seen from outside a checkpointed block: hooks within it are its own."""
    sizes = {how: step(how)[1] for how in (False, True, "selective")}
    assert sizes[True] <= sizes["selective"] < sizes[False]


def test_products_kept_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[Any, int] = {}
    for how in (False, True, "selective"):
        with CountProducts() as count:
            step(how)
        counted[how] = count.seen
    # Of queries to values, attention's output, up and down nobody needs the last again.
    assert counted[True] - counted[False] == 3 * LAYERS
    assert counted["selective"] - counted[False] == LAYERS, "attention's output"


class CountProducts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products as they reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.recompute='selectiv': must be true, false or selective"):
        refuse_recompute("selectiv")  # type: ignore[arg-type]
