"""The same value with a share of its gradient."""

from __future__ import annotations

import pytest
import torch

from lit_stable.model.gradient_shrink import shrink_gradient


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_is_kept_bit_for_bit_and_gradient_is_exactly_the_share(share, dtype):
    torch.manual_seed(0)
    x = torch.randn(50, dtype=dtype, requires_grad=True)
    weights = torch.randn(50, dtype=dtype)
    y = shrink_gradient(x, torch.tensor(share))
    assert torch.equal(y, x)
    (y * weights).sum().backward()
    assert torch.equal(x.grad, weights * torch.tensor(share))


def test_a_compiled_graph_serves_all_shares():
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(shrink_gradient, backend=count, fullgraph=True, dynamic=False)
    for share in (0.1, 0.2, 0.3):
        x = torch.ones(3, requires_grad=True)
        compiled(x, torch.tensor(share)).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), share))
    assert len(graphs) == 1
