from __future__ import annotations

import csv
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot
from torch import nn

from lit_stable.callbacks import AccumulationWindows, GradNorm, LayerNormFreeze
from lit_stable.callbacks.layer_norm_freeze import refuse_what_cannot_freeze_parts

NORM = ("net.1.weight", "net.1.bias")
both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])


class NormModule(TinyModule):
    """Linear, LayerNorm, Tanh, Linear; no parameter's name contains "norm"."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.net.insert(1, nn.LayerNorm(8))


class BuiltLate(NormModule):
    """Its net exists from ``configure_model`` on."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.net = self.net, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net, self.made = self.made, None


def states(callback: LayerNormFreeze, module: TinyModule, steps: int, *others: Any, **options: Any) -> list[Any]:
    """Weights and optimizer state, by parameter name, before the first step and after each."""
    seen: list[Any] = []

    def note(trainer: Any, *rest: Any) -> None:
        optimizer = trainer.optimizers[0]
        seen.append(
            {
                name: {"weight": p.detach().clone(), **{k: v.clone() for k, v in optimizer.state.get(p, {}).items()}}
                for name, p in trainer.lightning_module.named_parameters()
            }
        )

    watches = [Watch("on_train_start", note), Watch("on_train_batch_end", note)]
    quiet_trainer(callback, *others, *watches, max_steps=steps, **options).fit(module, TinyData())
    return seen


def changed(seen: list[Any], name: str) -> list[bool]:
    return [not torch.equal(a[name]["weight"], b[name]["weight"]) for a, b in itertools.pairwise(seen)]


@both_kernels
def test_in_a_window_norms_and_their_moments_keep_every_bit_and_move_before_and_after(fused: bool) -> None:
    callback = LayerNormFreeze([{"start": 2, "stop": 5}])
    seen = states(callback, NormModule(adamw(fused=fused, weight_decay=0.5)), 7)
    for name in NORM:
        assert changed(seen, name) == [True, True, False, False, False, True, True]
        assert_same_bits(seen[5][name], seen[2][name])  # moments and step count too
    assert changed(seen, "net.0.weight") == [True] * 7
    assert [int(s["net.1.weight"]["step"]) for s in seen] == [0, 1, 2, 2, 2, 2, 3, 4]


@both_kernels
def test_reset_moments_make_the_first_step_after_the_window_a_first_step(fused: bool) -> None:
    callback = LayerNormFreeze([{"start": 2, "stop": 4}], moments="reset")
    seen = states(callback, NormModule(adamw(fused=fused)), 5)
    assert [int(s["net.1.weight"]["step"]) for s in seen] == [0, 1, 2, 0, 0, 1]
    assert not seen[3]["net.1.weight"]["exp_avg"].any()
    assert not seen[4]["net.1.weight"]["exp_avg_sq"].any()
    # Adam's first step: the size of the learning rate, whatever the gradient; then decay by lr * 0.1.
    before, after = seen[4]["net.1.bias"]["weight"], seen[5]["net.1.bias"]["weight"]
    torch.testing.assert_close((after - before * (1 - 0.05 * 0.1)).abs(), torch.full((8,), 0.05), rtol=1e-3, atol=0)
    assert [int(s["net.0.weight"]["step"]) for s in seen] == [0, 1, 2, 3, 4, 5]


def test_reset_leaves_everything_after_a_second_window_reset_too() -> None:
    callback = LayerNormFreeze([{"start": 1, "stop": 2}, {"start": 3, "stop": 4}], moments="reset")
    seen = states(callback, NormModule(), 5)
    assert [int(s["net.1.weight"]["step"]) for s in seen] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("make", [NormModule, BuiltLate], ids=["built_early", "built_in_configure_model"])
def test_a_frozen_backbone_whose_norms_are_set_free(make: Any) -> None:
    rules: Any = [{"modules": ["net.0"], "norms": "except"}, {"modules": ["net.1"], "stop": 2}]
    needed: list[bool] = []
    module = make()

    def of_trainable(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        needed.extend(p.requires_grad for p in parameters)
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.05)

    module.make_optimizer = of_trainable
    gradients: list[bool] = []
    watch = Watch("on_before_optimizer_step", lambda t, o: gradients.append(module.net[0].weight.grad is not None))
    seen = states(LayerNormFreeze(rules), module, 4, watch)
    assert needed == [False, False, True, True, True, True]  # before the optimizer was made, so before wrapping
    assert gradients == [False] * 4
    assert changed(seen, "net.0.weight") == [False] * 4
    assert changed(seen, "net.1.weight") == [False, False, True, True]
    assert changed(seen, "net.4.weight") == [True] * 4
    assert all(p.requires_grad for p in module.parameters())  # as found
    assert "configure_model" not in vars(module)


def test_a_constant_parameter_that_the_optimizer_holds_stays_and_has_state() -> None:
    rules: Any = [{"modules": ["net.0"], "norms": "except"}]
    seen = states(LayerNormFreeze(rules), NormModule(adamw(weight_decay=0.5)), 3)
    assert changed(seen, "net.0.weight") == [False] * 3
    assert int(seen[0]["net.0.weight"]["step"]) == int(seen[3]["net.0.weight"]["step"]) == 0


def test_frozen_gradients_do_not_count_in_the_norm() -> None:
    norms: list[float] = []
    free: list[float] = []

    def note(trainer: Any, optimizer: Any) -> None:
        norms.append(float(GradNorm.of(trainer).value))
        grads = {n: p.grad for n, p in trainer.lightning_module.named_parameters()}
        assert {n for n, g in grads.items() if g is None} == set(NORM)
        free.append(float(nn.utils.get_total_norm([g for g in grads.values() if g is not None])))

    watch = Watch("on_before_optimizer_step", note)
    quiet_trainer(GradNorm(), LayerNormFreeze([{"stop": 9}]), watch, max_steps=1).fit(NormModule(), TinyData())
    assert norms[-1] == pytest.approx(free[-1], rel=1e-6)


@pytest.mark.parametrize(("unit", "stop"), [("steps", 2), ("samples", 12), ("samples", 7), ("tokens", 48)])
def test_windows_are_in_steps_samples_or_tokens_of_the_committed_progress(unit: Any, stop: int) -> None:
    callback = LayerNormFreeze([{"stop": stop}], unit=unit)
    seen = states(callback, NormModule(), 4, AccumulationWindows(6, 2))  # 6 samples of 4 tokens a step
    per_step = [seen[0], *seen[3::3]]
    assert changed(per_step, "net.1.weight") == [False, False, True, True]


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_resumes_bit_for_bit_from_before_within_and_after_the_window(moments: Any, tmp_path: Path) -> None:
    def fit(*others: Any, resume: Path | None = None) -> Any:
        callback = LayerNormFreeze([{"start": 2, "stop": 4}], moments=moments)
        trainer = quiet_trainer(callback, *others, max_steps=6)
        trainer.fit(NormModule(), TinyData(), ckpt_path=resume)
        return snapshot(trainer)

    straight = fit(SaveAtSteps(tmp_path))
    for name in ("start", "micro-1", "micro-2", "micro-3", "micro-4", "micro-5"):
        assert_same_bits(fit(resume=tmp_path / f"{name}.ckpt"), straight, name)


def test_a_resume_may_have_other_windows() -> None:
    first = quiet_trainer(LayerNormFreeze([{"stop": 2}]), max_steps=3)
    first.fit(NormModule(), TinyData())
    first.save_checkpoint("a.ckpt")
    for rules in ([{"start": 3}], [{"modules": ["net.0"], "norms": "with", "stop": 9}], [{"start": 1, "stop": 2}]):
        second = quiet_trainer(LayerNormFreeze(rules), max_steps=4)  # type: ignore[arg-type]
        second.fit(module := NormModule(), TinyData(), ckpt_path="a.ckpt")
        saved = torch.load("a.ckpt", weights_only=True)["state_dict"]
        frozen = {name for name, p in module.named_parameters() if torch.equal(p, saved[name])}
        assert (
            frozen
            == {0: set(NORM), 1: {"net.0.weight", "net.0.bias"}, 2: set()}[
                0 if rules == [{"start": 3}] else 1 if "modules" in rules[0] else 2
            ]
        )


def test_log_touches_nothing_and_says_what_would_have_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules: Any = [{"modules": ["net.0"], "norms": "except"}, {"start": 1, "stop": 2}]

    def fit(*callbacks: Any) -> tuple[Any, list[float], list[str]]:
        said: list[str] = []
        monkeypatch.setattr("lit_stable.callbacks.events.rank_zero_info", said.append)
        trainer = quiet_trainer(*callbacks, GradNorm(), max_steps=3, logger=CSVLogger(tmp_path), log_every_n_steps=1)
        trainer.fit(NormModule(), TinyData(resumes=False))
        with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return snapshot(trainer), [float(row.get("stability/frozen_tensors", 0)) for row in rows], said

    without, _, _ = fit()
    logging, would_be, would_say = fit(LayerNormFreeze(rules, moments="reset", action="log"))
    acting, counts, said = fit(LayerNormFreeze(rules, moments="reset"))
    assert_same_bits(logging, without)
    assert not torch.equal(acting["weights"]["net.0.weight"], without["weights"]["net.0.weight"])
    assert would_be == counts == [2.0, 4.0, 2.0]
    assert said == [
        "LayerNormFreeze, steps 0: freeze net.0.bias, net.0.weight",
        "LayerNormFreeze, steps 1: freeze net.1.bias, net.1.weight",
        "LayerNormFreeze, steps 2: set free net.1.bias, net.1.weight",
    ]
    assert would_say == [line.replace(": ", ": would ") for line in said]


def test_only_what_was_frozen_here_is_set_free_in_the_end() -> None:
    module = NormModule()
    module.net[0].bias.requires_grad_(False)
    quiet_trainer(LayerNormFreeze([{"modules": ["net.0"], "norms": "with"}]), max_steps=1).fit(module, TinyData())
    assert [p.requires_grad for p in module.net[0].parameters()] == [True, False]


def test_configure_model_may_be_called_by_another_callback_first() -> None:
    module = BuiltLate()
    early = Watch("setup", lambda trainer, *rest, **named: module.configure_model())
    callback = LayerNormFreeze([{"modules": ["net.0"], "norms": "except"}])
    constant = Watch("on_train_start", lambda trainer: seen.append(module.net[0].weight.requires_grad))
    seen: list[bool] = []
    quiet_trainer(callback, early, constant, max_steps=1).fit(module, TinyData())
    assert seen == [False]
    assert module.net[0].weight.requires_grad


def test_a_fit_after_one_that_failed_acts_the_same() -> None:
    class Fails(BuiltLate):
        fails = True

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            if self.fails and batch_idx == 1:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    callback = LayerNormFreeze([{"modules": ["net.0"], "norms": "except"}])
    module = Fails()
    with pytest.raises(RuntimeError, match="broken"):
        quiet_trainer(callback).fit(module, TinyData())
    assert module.net[0].weight.requires_grad  # what was touched does not outlive the fit
    module.fails = False
    before = module.net[0].weight.detach().clone()
    quiet_trainer(callback).fit(module, TinyData())
    assert torch.equal(module.net[0].weight, before)
    assert all(p.requires_grad for p in module.parameters())
    assert "configure_model" not in vars(module)


def test_warns_that_bf16_norms_cannot_move_at_a_low_rate() -> None:
    def fit(rate: float) -> TinyModule:
        rules: Any = [{"stop": 1}, {"modules": ["net.0"], "norms": "with", "stop": 1}]
        trainer = quiet_trainer(LayerNormFreeze(rules), max_steps=4, precision="bf16-true")
        trainer.fit(module := NormModule(adamw(lr=rate, weight_decay=0.0)), TinyData(resumes=False))
        return module

    with pytest.warns(
        UserWarning, match="1 norm gains are stored in torch.bfloat16 and the learning rate is at most 0.001"
    ):
        module = fit(1e-3)
    assert module.net[1].weight.eq(1.0).all()
    assert module.net[1].bias.any()  # begins at 0, where bf16 is fine
    assert not fit(0.01).net[1].weight.eq(1.0).all()


@pytest.mark.parametrize("make", [NormModule, BuiltLate], ids=["built_early", "built_in_configure_model"])
def test_a_pattern_that_selects_nothing_stops_the_fit_before_the_first_step(make: Any) -> None:
    with pytest.raises(MisconfigurationException, match="pattern 'nett': matches no module; names near it are net"):
        quiet_trainer(LayerNormFreeze([{"modules": ["nett"]}])).fit(make(), TinyData())


def test_a_parameter_that_no_window_could_set_free_is_refused() -> None:
    module = NormModule()
    module.net[1].requires_grad_(False)
    with pytest.raises(
        MisconfigurationException, match=r"net.1.bias, net.1.weight has requires_grad=False already, so"
    ):
        quiet_trainer(LayerNormFreeze([{"stop": 3}])).fit(module, TinyData())


def test_a_parameter_that_no_optimizer_holds_is_refused() -> None:
    module = NormModule()
    module.make_optimizer = lambda parameters: torch.optim.AdamW(module.net[0].parameters())
    with pytest.raises(MisconfigurationException, match=r"net.1.bias, net.1.weight stands in no optimizer"):
        quiet_trainer(LayerNormFreeze([{"stop": 3}])).fit(module, TinyData())


def test_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"freezes all 6 parameters for good, so nothing is left to train"
    ):
        quiet_trainer(LayerNormFreeze([{"norms": "with"}])).fit(NormModule(), TinyData())


def test_a_model_that_fsdp1_wraps_already_is_refused_for_good_but_not_for_a_window() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Stands in for torch's, which wants an accelerator."""

    module = NormModule()
    module.net = FullyShardedDataParallel(*module.net)
    with pytest.raises(
        MisconfigurationException, match=r"net.1.bias, net.1.weight is wrapped by FSDP1 already, too late"
    ):
        LayerNormFreeze([{}])._select(module)
    LayerNormFreeze([{"stop": 5}])._select(module)
    assert module.net[1].weight.requires_grad


def test_flat_parameters_of_fsdp1_are_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(kwargs={"use_orig_params": False}))
    with pytest.raises(
        MisconfigurationException, match=r"`FSDPStrategy\(use_orig_params=False\)`: .* set use_orig_params"
    ):
        refuse_what_cannot_freeze_parts(trainer)


def test_a_sharded_gradient_scaler_is_refused() -> None:
    class ShardedGradScaler:
        pass

    plugin = SimpleNamespace(scaler=ShardedGradScaler())
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(), precision_plugin=plugin, precision="16-mixed")
    with pytest.raises(MisconfigurationException, match=r"`Trainer\(precision='16-mixed'\)`: .* use bf16-mixed"):
        refuse_what_cannot_freeze_parts(trainer)
