from __future__ import annotations

import math

import torch
from torch import nn

from lit_stable.replay.module_outputs import ModuleOutputs, first_outlier, merged


def net(factor: float = 1.0, at: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), nn.Linear(3, 2))
    layers[1][1].register_forward_hook(
        lambda m, i, o: o * torch.tensor([factor if row == at else 1.0 for row in range(4)])[:, None]
    )
    return layers


def seen(network: nn.Module) -> dict[str, dict[int, float]]:
    watch = ModuleOutputs(network)
    watch.begin([10, 11, 12, 13])
    network(torch.ones(4, 3))
    watch.end()
    network(torch.full((4, 3), 1e9))  # recomputed in a backward pass
    watch.remove()
    assert all(not m._forward_hooks or m is network[1][1] for m in network.modules())
    return watch.seen


def test_modules_stand_in_the_order_in_which_they_finish() -> None:
    found = seen(net())
    assert list(found) == ["0", "1.0", "1.1", "1", "2"]
    assert list(found["1.1"]) == [10, 11, 12, 13]
    assert first_outlier(found, {}) is None


def test_the_innermost_module_that_is_not_finite_is_named_with_its_sample() -> None:
    outlier = first_outlier(seen(net(math.nan)), {})
    assert outlier is not None
    assert outlier.sentence() == "first output that is not finite: 1.1, sample 11"


def test_a_surge_of_one_sample_is_named() -> None:
    outlier = first_outlier(seen(net(50.0, at=2)), {})
    assert outlier is not None
    assert (outlier.module, outlier.sample) == ("1.1", 12)
    assert "50 times the usual" in outlier.sentence()


def test_a_surge_of_all_samples_is_seen_against_the_step_before() -> None:
    before = seen(net())
    after = {name: {sample: 30 * value for sample, value in values.items()} for name, values in before.items()}
    assert first_outlier(after, {}) is None
    outlier = first_outlier(after, before)
    assert outlier is not None
    assert outlier.module == "0"


def test_ranks_are_merged_in_the_order_of_the_first() -> None:
    assert merged([{"a": {1: 1.0}, "b": {1: 2.0}}, {"b": {2: 3.0}}]) == {"a": {1: 1.0}, "b": {1: 2.0, 2: 3.0}}
