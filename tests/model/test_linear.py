"""The gradient of a linear layer that leaves its product in fp32; on CUDA: tests/gpu/test_linear_on_gpu.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lit_stable.model.linear import Linear, WideGradient

TOKENS, INPUTS, OUTPUTS = 600, 5, 7


def operands(bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(1)
    tensors = [torch.randn(2, TOKENS // 2, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)]
    x, weight, offset = (tensor.requires_grad_() for tensor in tensors)
    return x, weight, offset if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_product_in_16_bits_with_gradients_that_were_not_rounded(dtype: torch.dtype, bias: bool) -> None:
    x, weight, offset = operands(bias)
    output = WideGradient.apply(x, weight, offset, dtype)
    with torch.autocast("cpu", dtype):
        assert torch.equal(output, nn.functional.linear(x, weight, offset))
    by_output = torch.randn(output.shape).to(dtype)
    output.backward(by_output)
    rows, narrow = by_output.double().flatten(0, 1), x.detach().to(dtype).double().flatten(0, 1)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad.double(), rows.t() @ narrow, rtol=1e-5, atol=1e-4)
    assert x.grad is not None
    assert torch.equal(x.grad, (by_output @ weight.detach().to(dtype)).float())
    if offset is not None:
        assert offset.grad is not None
        torch.testing.assert_close(offset.grad.double(), rows.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(INPUTS,), (0, INPUTS), (2, 3, 4, INPUTS)])
def test_it_takes_inputs_of_any_shape(shape: tuple[int, ...]) -> None:
    _, weight, offset = operands(True)
    x = torch.randn(shape, requires_grad=True)
    WideGradient.apply(x, weight, offset, torch.bfloat16).float().sum().backward()
    assert weight.grad is not None
    expected = x.detach().bfloat16().float().reshape(-1, INPUTS).sum(0).expand(OUTPUTS, INPUTS)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    tensors = operands(True)
    tensors[frozen].requires_grad_(False)  # type: ignore[union-attr]
    WideGradient.apply(*tensors, torch.bfloat16).float().sum().backward()
    assert [tensor.grad is None for tensor in tensors if tensor is not None] == [n == frozen for n in range(3)]


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    x, weight, _ = operands(False)
    output = WideGradient.apply(x, weight, None, torch.bfloat16)
    (by_weight,) = torch.autograd.grad(output.float().square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        by_weight.sum().backward()


def test_on_a_cpu_it_is_torchs_own() -> None:
    layer = Linear(INPUTS, OUTPUTS)
    x = torch.randn(3, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        assert type(layer(x).grad_fn) is type(nn.functional.linear(x, layer.weight, layer.bias).grad_fn)
