"""Weights, gradients, updates and moments on one process, against the definitions; two ranks in tests/distributed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import ByHand, differences
from lightning.pytorch.plugins import MixedPrecision
from tiny_fit import TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot
from tiny_gpt_run import fit
from torch import nn

from lit_stable.callbacks import GradientMonitor, OptimizerMonitor, SafeCheckpoints, UpdateMonitor, WeightMonitor
from lit_stable.callbacks.base import MisconfigurationException

OPTIONS: dict[str, Any] = {"embed_norm": True, "qk_norm": "rmsnorm", "bias": True}


def all_four() -> tuple[Any, ...]:
    return (
        WeightMonitor(),
        GradientMonitor(per_tensor=True),
        UpdateMonitor(per_tensor=True),
        OptimizerMonitor(None, True),
    )


def test_all_numbers_are_those_of_the_definitions() -> None:
    hand = ByHand()
    run = fit(steps=4, callbacks=(hand, *all_four()), max_norm=1e9, **OPTIONS)
    assert len(hand.expected) > 200
    assert differences(hand.expected, run.trainer.callback_metrics) == {}


def test_nothing_else_is_logged_under_their_names() -> None:
    hand = ByHand()
    run = fit(steps=1, callbacks=(hand, *all_four()), **OPTIONS)
    families = ("weight_rms", "norm_gain", "grad_norm", "embedding_grad", "update_", "adam_")
    logged = {name for name in run.trainer.callback_metrics if name.partition("/")[2].startswith(families)}
    assert logged == hand.expected.keys()


def test_an_update_is_the_one_that_adams_formula_gives() -> None:
    """Decay included: the other way to measure it, from the state, for the one optimizer for which it is right."""
    lr, decay, eps = 0.01, 0.1, 1e-8
    seen: dict[str, Any] = {}

    def before(trainer: Any, optimizer: Any) -> None:
        seen["before"] = [p.detach().double().clone() for p in trainer.lightning_module.parameters()]

    def after(trainer: Any, *rest: Any) -> None:
        optimizer = trainer.optimizers[0]
        total = size = 0.0
        for p, old in zip(trainer.lightning_module.parameters(), seen["before"], strict=True):
            state = optimizer.state[p]
            step = int(state["step"])
            first = state["exp_avg"].double() / (1 - 0.9**step)
            second = state["exp_avg_sq"].double() / (1 - 0.999**step)
            move = lr * (first / (second.sqrt() + eps) + decay * old)
            total, size = total + float(move.square().sum()), size + move.numel()
        seen["rms"] = math.sqrt(total / size)

    watches = Watch("on_before_optimizer_step", before), Watch("on_train_batch_end", after)
    trainer = quiet_trainer(UpdateMonitor(), *watches, max_steps=5, log_every_n_steps=1)
    trainer.fit(TinyModule(adamw(lr=lr, weight_decay=decay, betas=(0.9, 0.999), eps=eps)), TinyData())
    assert float(trainer.callback_metrics["stability/update_rms"]) == pytest.approx(seen["rms"], rel=1e-5)


def test_a_gain_is_1_at_the_start_and_a_weight_has_the_spread_of_its_initialisation() -> None:
    """BloombergGPT's scale: the norm over the root of the number of elements."""
    seen: dict[str, float] = {}
    watch = Watch(
        "on_train_batch_end", lambda t, *rest: seen.update({k: float(v) for k, v in t.callback_metrics.items()})
    )
    fit(steps=1, callbacks=(WeightMonitor(), watch), d_model=128, embed_norm=True)
    gains = {name: value for name, value in seen.items() if "norm_gain" in name}
    assert set(gains) >= {
        "stability/norm_gain/gpt.embed_norm.weight",
        "stability/norm_gain/gpt.blocks.0.attention_norm.weight",
    }
    assert list(gains.values()) == pytest.approx([1.0] * len(gains), rel=1e-6)
    assert seen["stability/weight_rms/gpt.blocks.0.attention.qkv.weight"] == pytest.approx(0.02, rel=0.02)
    assert seen["stability/weight_rms/gpt.blocks.0.attention.out.weight"] == pytest.approx(0.02 / 2, rel=0.02)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))


def test_a_class_of_ones_own_may_be_a_norm() -> None:
    module = TinyModule()
    module.scale = Norms()
    path = f"{Norms.__module__}.Norms"
    import sys

    sys.modules.setdefault(Norms.__module__, sys.modules[__name__])
    trainer = quiet_trainer(WeightMonitor(norm_types=[path]), max_steps=1, log_every_n_steps=1)
    trainer.fit(module, TinyData())
    assert float(trainer.callback_metrics["stability/norm_gain/scale.weight"]) == 2.0


def test_a_skipped_step_has_an_update_of_0_and_a_nan_gradient_stays_where_it_is() -> None:
    """A step that is not finite changes nothing, and only the layer with the NaN is not finite."""

    def spoil(trainer: Any, optimizer: Any) -> None:
        trainer.lightning_module.gpt.blocks[1].mlp.up.weight.grad[0, 0] = math.nan

    run = fit(
        steps=1,
        callbacks=(Watch("on_before_optimizer_step", spoil), *all_four()),
        nan=Watch("on_before_optimizer_step", spoil),
    )
    logged = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    assert logged["stability/update_rms"] == 0.0
    assert math.isnan(logged["stability/grad_norm_layer/gpt.blocks.1"])
    assert math.isnan(logged["stability/embedding_grad_share"])
    assert math.isfinite(logged["stability/grad_norm_layer/gpt.blocks.0"])
    assert math.isfinite(logged["stability/grad_norm_component/gpt.blocks.mlp.down.weight"])


def test_below_eps_is_the_share_of_elements_whose_gradient_eps_outweighs() -> None:
    module = TinyModule(adamw(lr=1e-3, eps=1e-1, betas=(0.0, 0.0)))
    shares: list[tuple[float, float]] = []

    def after(trainer: Any, *rest: Any) -> None:
        roots = torch.cat([trainer.optimizers[0].state[p]["exp_avg_sq"].flatten() for p in module.parameters()]).sqrt()
        shares.append(
            (float((roots < 0.1).float().mean()), float(trainer.callback_metrics["stability/adam_below_eps"]))
        )

    monitor = OptimizerMonitor()
    trainer = quiet_trainer(monitor, Watch("on_train_batch_end", after), max_steps=3, log_every_n_steps=1)
    trainer.fit(module, TinyData())
    assert all(expected == pytest.approx(found, abs=1e-6) for expected, found in shares[1:])
    assert 0 < shares[-1][0] < 1


def test_a_frozen_weight_is_logged_and_one_without_a_gradient_counts_as_zero() -> None:
    module = TinyModule()
    module.net[0].weight.requires_grad_(False)
    module.make_optimizer = lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)
    trainer = quiet_trainer(*all_four(), max_steps=2, log_every_n_steps=1)
    trainer.fit(module, TinyData())
    names = set(trainer.callback_metrics)
    assert "stability/weight_rms/net.0.weight" in names
    assert "stability/update_rms_tensor/net.0.weight" not in names
    assert "stability/adam_grad_rms_tensor/net.0.bias" in names


def test_a_state_that_no_step_has_entered_counts_as_zero() -> None:
    """It exists from the start with `SafeCheckpoints`; under FSDP1 for what other ranks hold, too."""
    trainer = quiet_trainer(SafeCheckpoints(), OptimizerMonitor(None, True), max_steps=1, log_every_n_steps=1)
    module = TinyModule()
    module.spare = nn.Parameter(torch.ones(3))
    trainer.fit(module, TinyData())
    assert float(trainer.optimizers[0].state[module.spare]["step"]) == 0
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if "adam_" in name}
    assert found["stability/adam_first_moment_tensor/spare"] == found["stability/adam_grad_rms_tensor/spare"] == 0
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_moments_of_what_is_no_adam_are_refused(make: Any) -> None:
    trainer = quiet_trainer(OptimizerMonitor(), max_steps=1)
    with pytest.raises(MisconfigurationException, match=f"{make.__name__} keeps no exp_avg and exp_avg_sq"):
        trainer.fit(TinyModule(lambda parameters: make(parameters, lr=0.1)), TinyData())


def test_codes_of_an_8_bit_adam_are_refused() -> None:
    def eight_bit(trainer: Any) -> None:
        optimizer = trainer.optimizers[0]
        for parameter in trainer.lightning_module.parameters():
            optimizer.state[parameter] = {"state1": torch.zeros(4, dtype=torch.uint8)}

    trainer = quiet_trainer(OptimizerMonitor(), max_steps=1, log_every_n_steps=1)
    monitor = next(c for c in trainer.callbacks if isinstance(c, OptimizerMonitor))
    module = TinyModule()
    trainer.fit(module, TinyData())
    monitor.on_fit_start(trainer, module)
    eight_bit(trainer)
    with pytest.raises(MisconfigurationException, match="in floating point"):  # where states come with the first step
        monitor.on_train_batch_end(trainer, module)
    with pytest.raises(MisconfigurationException, match="in floating point"):
        monitor.on_fit_start(trainer, module)


def test_a_gradient_scalers_factor_is_logged_and_taken_out_of_the_norms() -> None:
    def norms(*plugins: Any) -> dict[str, float]:
        options = {"plugins": list(plugins)} if plugins else {}
        trainer = quiet_trainer(GradientMonitor(), max_steps=1, log_every_n_steps=1, **options)
        trainer.fit(TinyModule(adamw(fused=True)), TinyData())
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    plain = norms()
    scaled = norms(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0)))
    assert scaled["stability/loss_scale"] == 64.0
    assert "stability/loss_scale" not in plain
    assert scaled["stability/grad_norm_layer/net.0"] == pytest.approx(
        plain["stability/grad_norm_layer/net.0"], rel=0.01
    )


def test_they_measure_only_when_due_and_move_no_bit() -> None:
    measured: list[int] = []

    def note(trainer: Any, *rest: Any) -> None:
        if trainer.callback_metrics.pop("stability/update_rms", None) is not None:
            measured.append(trainer.global_step)

    watch = Watch("on_train_batch_end", note)
    monitors = [type(m)(every_steps=4) for m in all_four()]
    runs = []
    for callbacks in ([], [*monitors, watch]):
        torch.manual_seed(0)
        trainer = quiet_trainer(*callbacks, max_steps=10, log_every_n_steps=2)
        trainer.fit(TinyModule(dropout=0.3), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])
    assert measured == [4, 8]
