"""Attention dropout by groups of heads: the same mask whoever holds the heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lit_stable.model.attention_dropout import drop_by_groups, dropout_groups


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: slice, p: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (6, 2), (8, 8), (12, 4), (16, 8), (25, 1), (40, 8)])
def test_heads_are_drawn_in_at_most_eight_groups_of_equal_size(heads: int, groups: int) -> None:
    assert dropout_groups(heads) == groups


def heads(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, 16, 4, generator=generator, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_devices_that_share_the_heads_draw_what_one_device_draws(ranks: int) -> None:
    q, k, v = heads(12)
    torch.manual_seed(5)
    whole = drop_by_groups(causal, q, k, v, 0.3, groups=4, n_head=12)
    after = torch.rand(3)
    whole.sum().backward()
    size = 12 // ranks
    for rank in range(ranks):
        parts = [t.detach()[:, rank * size : (rank + 1) * size].requires_grad_() for t in (q, k, v)]
        torch.manual_seed(5)
        mine = drop_by_groups(causal, *parts, 0.3, groups=4, n_head=12, first_head=rank * size)
        assert torch.equal(mine, whole[:, rank * size : (rank + 1) * size])
        assert torch.equal(torch.rand(3), after)  # what is drawn next does not depend on the heads held
        mine.sum().backward()
        assert torch.equal(parts[2].grad, v.grad[:, rank * size : (rank + 1) * size])


def test_every_group_has_a_mask_of_its_own_and_every_call_others() -> None:
    ones = torch.ones(1, 16, 8, 8)
    v = torch.eye(8).expand(1, 16, 8, 8).contiguous()  # so that the output is the dropped weights
    torch.manual_seed(1)
    masks = [drop_by_groups(causal, ones, ones, v, 0.5, groups=8, n_head=16) == 0 for _ in range(2)]
    seen = {tuple(mask[0, head].flatten().tolist()) for mask in masks for head in range(16)}
    assert len(seen) == 32


def test_the_share_that_is_dropped_is_p_and_the_rest_is_scaled_up() -> None:
    ones = torch.ones(4, 8, 32, 4)
    v = torch.ones(4, 8, 32, 1)
    y = drop_by_groups(causal, ones, ones, v, 0.25, groups=8, n_head=8)
    assert float(y[:, :, 1:].mean()) == pytest.approx(1.0, abs=0.02)
    assert float((y[:, :, 0] == 0).float().mean()) == pytest.approx(0.25, abs=0.2)


def test_the_seeds_are_used_up_so_that_two_layers_differ() -> None:
    q, k, v = heads(4)
    torch.manual_seed(2)
    first, second = (drop_by_groups(causal, q, k, v, 0.5, groups=4, n_head=4) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_group_that_is_not_whole_here_is_refused() -> None:
    q, k, v = heads(4)
    with pytest.raises(ValueError, match=r"dropout=0\.1: .* 4 groups of 3 heads, .* device holds 4 heads; take a"):
        drop_by_groups(causal, q, k, v, 0.1, groups=4, n_head=12)


def test_the_kernel_is_told_which_heads_it_has_and_gets_their_keys_and_values() -> None:
    seen: list[tuple[slice, torch.Size, torch.Size]] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: slice, p: float) -> torch.Tensor:
        seen.append((heads, q.shape, k.shape))
        return q + v.mean(1, keepdim=True)

    q, k = torch.zeros(1, 8, 2, 4), torch.zeros(1, 4, 2, 4)
    v = torch.arange(4.0)[None, :, None, None].expand(1, 4, 2, 4)  # two query heads share each
    y = drop_by_groups(kernel, q, k, v, 0.1, groups=4, n_head=16, first_head=8)
    assert [heads for heads, *_ in seen] == [slice(8, 12), slice(12, 16)]
    assert {shapes for _, *shapes in map(tuple, seen) for shapes in [tuple(shapes)]} == {((1, 4, 2, 4), (1, 2, 2, 4))}
    assert y[0, :, 0, 0].tolist() == [0.5] * 4 + [2.5] * 4
