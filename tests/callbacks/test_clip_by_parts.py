"""GradClip where groups, layers or tensors have norms of their own, through the Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import GradClip, GradNorm, LayerNormFreeze, Progress
from lit_stable.callbacks.ada_gc import AdaGC
from lit_stable.callbacks.z_clip import ZClip

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
every_scope = pytest.mark.parametrize("scope", ["group", "layer", "tensor", ["net.0"]], ids=str)

Gradients = dict[str, torch.Tensor]


def two_groups(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    """Matrices and biases, as most projects have them."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        matrices, biases = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim < 2]
        return adamw(**options)([{"params": matrices}, {"params": biases, "weight_decay": 0.0}])  # type: ignore[list-item]

    return make


def gradients(
    callback: GradClip, steps: int = 1, fused: bool = False, **module: Any
) -> list[tuple[Gradients, Gradients]]:
    """Per step, the gradients before and after clipping."""
    seen: list[list[Gradients]] = [[], []]

    def note(where: int) -> Callable[..., None]:
        def look(trainer: Any, optimizer: Any) -> None:
            named = trainer.lightning_module.named_parameters()
            seen[where].append({name: p.grad.clone() for name, p in named})

        return look

    watches = [Watch("on_before_optimizer_step", note(where)) for where in (0, 1)]
    trainer = quiet_trainer(watches[0], callback, watches[1], max_steps=steps, log_every_n_steps=0)
    trainer.fit(TinyModule(two_groups(fused=fused, lr=1e-3), **module), TinyData())
    return list(zip(*seen, strict=True))


MEMBERS: dict[str, list[list[str]]] = {
    "group": [["net.0.weight", "net.3.weight"], ["net.0.bias", "net.3.bias"]],
    "layer": [["net.0.weight", "net.0.bias"], ["net.3.weight", "net.3.bias"]],
    "tensor": [["net.0.weight"], ["net.0.bias"], ["net.3.weight"], ["net.3.bias"]],
    "['net.0']": [["net.0.weight", "net.0.bias"], ["net.3.weight", "net.3.bias"]],
}


@both_kernels
@every_scope
@pytest.mark.parametrize("norm_type", ["l2", "inf"])
def test_each_part_alone_has_at_most_the_largest_norm(fused: bool, scope: Any, norm_type: Any) -> None:
    largest = {"l2": 0.35, "inf": 0.15}[norm_type]
    ((before, after),) = gradients(GradClip(largest, norm_type=norm_type, scope=scope), fused=fused)
    order = math.inf if norm_type == "inf" else 2
    clipped = 0
    for names in MEMBERS[str(scope)]:
        norm = torch.cat([before[name].flatten() for name in names]).norm(order)
        factor = min(1.0, largest / norm.item())
        clipped += factor < 1
        for name in names:
            torch.testing.assert_close(after[name], before[name] * factor, rtol=1e-6, atol=0)
            assert factor < 1 or torch.equal(after[name], before[name])
    assert 0 < clipped <= len(MEMBERS[str(scope)])


def test_one_group_of_all_parameters_is_clipped_as_the_global_norm_is() -> None:
    ends = []
    for scope in ("global", "group"):
        trainer = quiet_trainer(GradClip(0.05, scope=scope), max_steps=5)
        trainer.fit(TinyModule(), TinyData())
        ends.append(snapshot(trainer)["weights"])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)


@both_kernels
@every_scope
def test_what_is_not_clipped_is_bit_identical_to_a_run_without_the_callback(fused: bool, scope: Any) -> None:
    ends = []
    for callbacks in ([], [GradClip(1e6, scope=scope)], [GradClip(1e-3, scope=scope, action="log")]):
        trainer = quiet_trainer(*callbacks, max_steps=4)
        trainer.fit(TinyModule(adamw(fused=fused)), TinyData(resumes=False))
        ends.append(snapshot(trainer))
    assert_same_bits(ends[1], ends[0])
    assert_same_bits(ends[2], ends[0])


class OneBadTensor(TinyModule):
    """In the given steps the gradient of one tensor, and of no other, is not finite."""

    def __init__(self, *args: Any, bad: dict[int, float], **options: Any) -> None:
        super().__init__(*args, **options)
        self.bad = bad

    def on_after_backward(self) -> None:
        if self.trainer.global_step in self.bad:
            self.net[3].bias.grad[1] = self.bad[self.trainer.global_step]


@both_kernels
@pytest.mark.parametrize(("bad", "norm_type"), [(math.nan, "l2"), (math.inf, "l2"), (math.nan, "inf")])
@pytest.mark.parametrize(
    "rule", [{"max_norm": 0.1}, {"adaptive": ZClip(warmup_steps=2)}, {"ada_gc": AdaGC(warmup_steps=2)}]
)
def test_one_tensor_that_is_not_finite_stops_the_whole_step_and_enters_nothing(
    fused: bool, bad: float, norm_type: Any, rule: dict[str, Any]
) -> None:
    after: dict[int, Any] = {}
    callback = GradClip(scope="tensor", norm_type=norm_type, **rule)
    note = lambda t, *rest: after.update({t.global_step: [snapshot(t), {**callback.state_dict(), "seen": 0}]})  # noqa: E731
    trainer = quiet_trainer(callback, Watch("on_train_batch_end", note), max_steps=6, log_every_n_steps=0)
    trainer.fit(OneBadTensor(adamw(fused=fused), bad={3: bad}), TinyData())
    assert_same_bits(after[4], after[3])
    assert not torch.equal(after[5][0]["weights"]["net.0.weight"], after[4][0]["weights"]["net.0.weight"])
    assert Progress.of(trainer).skipped == 1


def test_ada_gc_clips_the_tensor_that_spikes_and_no_other() -> None:
    class Spike(TinyModule):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 20:
                self.net[3].bias.grad.mul_(100.0)

    callback = GradClip(ada_gc=AdaGC(warmup_steps=10, rel_threshold=3.0))
    seen: list[Any] = []
    note = lambda t, o: seen.append({n: p.grad.norm().item() for n, p in t.lightning_module.named_parameters()})  # noqa: E731
    trainer = quiet_trainer(callback, Watch("on_before_optimizer_step", note), max_steps=21, log_every_n_steps=0)
    running: list[Any] = []
    trainer.callbacks.append(Watch("on_train_batch_end", lambda t, *r: running.append(callback.state_dict()["ada_gc"])))
    trainer.fit(Spike(adamw(fused=False, lr=1e-4)), TinyData())
    assert seen[20]["net.3.bias"] == pytest.approx(3.0 * running[19]["net.3.bias"][1], rel=1e-5)
    untouched = {"net.0.weight", "net.0.bias", "net.3.weight"}
    assert all(seen[20][name] < 3.0 * running[19][name][1] for name in untouched)


def test_the_first_steps_of_ada_gc_are_clipped_by_the_global_norm() -> None:
    rows = gradients(GradClip(ada_gc=AdaGC(warmup_steps=2, warmup_max_norm=0.5, rel_threshold=1e6)), steps=3)
    for before, after in rows[:2]:
        factor = 0.5 / torch.cat([g.flatten() for g in before.values()]).norm()
        for name in before:
            torch.testing.assert_close(after[name], before[name] * factor, rtol=1e-5, atol=0)
    assert_same_bits(rows[2][1], rows[2][0])


def test_a_cap_holds_with_ada_gc_as_well() -> None:
    for before, after in gradients(GradClip(0.01, ada_gc=AdaGC(warmup_steps=1)), steps=3):
        for name in before:
            assert after[name].norm().item() == pytest.approx(0.01, rel=1e-5)


def test_a_frozen_tensor_is_free_again_after_its_window() -> None:
    callback = GradClip(ada_gc=AdaGC(warmup_steps=1, warmup_max_norm=1e3, rel_threshold=1e3))
    freeze = LayerNormFreeze([{"modules": ["net.0"], "norms": "with", "stop": 3}])
    trainer = quiet_trainer(callback, freeze, max_steps=5, log_every_n_steps=0)
    before = TinyModule().state_dict()
    trainer.fit(module := TinyModule(), TinyData())
    assert not torch.equal(module.state_dict()["net.0.weight"], before["net.0.weight"])
    assert callback.state_dict()["ada_gc"]["net.0.weight"][0] == 1.0
    assert callback.state_dict()["clipped"] == 0.0


RULES: list[dict[str, Any]] = [
    {"ada_gc": AdaGC(warmup_steps=3)},
    {"scope": "layer", "adaptive": ZClip(warmup_steps=3, z_threshold=0.5), "max_norm": 0.5},
    {"scope": "tensor", "schedule": [{"from": 4, "max_norm": 0.02}], "max_norm": 0.2},
]


@both_kernels
@pytest.mark.parametrize("rule", RULES, ids=["ada_gc", "z_clip", "schedule"])
def test_resumes_bit_for_bit(fused: bool, rule: dict[str, Any], tmp_path: Path) -> None:
    def fit(*others: Any, resume: Path | None = None) -> Any:
        trainer = quiet_trainer(callback := GradClip(**rule), *others, max_steps=8, log_every_n_steps=5)
        trainer.fit(TinyModule(adamw(fused=fused), poison={2: math.nan, 6: 100.0}), TinyData(), ckpt_path=resume)
        return [snapshot(trainer), callback.state_dict()]

    straight = fit(SaveAtSteps(tmp_path))
    for name in ("start", "micro-2", "micro-3", "micro-6"):
        resumed = fit(resume=tmp_path / f"{name}.ckpt")
        assert_same_bits(resumed, straight, name)


def test_a_run_goes_on_with_parts_that_were_never_clipped_by_themselves(tmp_path: Path) -> None:
    first = quiet_trainer(GradClip(adaptive=ZClip()), max_steps=3)
    first.fit(TinyModule(), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(callback := GradClip(scope="layer", adaptive=ZClip()), max_steps=5)
    second.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    assert {name: row[0] for name, row in callback.state_dict()["z_clip"].items()} == {"net.0": 2.0, "net.3": 2.0}


def test_the_fraction_is_of_parts_and_the_level_is_the_lowest(tmp_path: Path) -> None:
    class Scaled(TinyModule):
        def on_after_backward(self) -> None:
            for index, parameter in enumerate(self.parameters()):
                parameter.grad.fill_(10.0 if index == 2 and self.trainer.global_step == 1 else 1e-3)

    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(GradClip(1.0, scope="tensor"), logger=logger, log_every_n_steps=2, max_steps=4)
    trainer.fit(Scaled(), TinyData())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    columns = {name: [float(row.split(",")[i]) for row in rows] for i, name in enumerate(header.split(","))}
    assert columns["stability/clip_frac"] == [0.125, 0.0]  # one of four tensors in one of two steps
    assert columns["stability/clip_level"] == [1.0, 1.0]


def test_norms_of_single_gradients_are_taken_once_per_step_and_before_clipping() -> None:
    found: list[Any] = []

    def note(trainer: Any, optimizer: Any) -> None:
        shared = GradNorm.of(trainer)
        each = shared.measure_each(optimizer)
        assert shared.measure_each(optimizer) is each
        found.append((each.square().sum().sqrt().item(), shared.value.item()))

    trainer = quiet_trainer(GradClip(1e-3, scope="tensor"), Watch("on_before_optimizer_step", note), max_steps=3)
    trainer.fit(TinyModule(), TinyData())
    assert len({norm for norm, _ in found}) == 3
    for norm, value in found:
        assert norm == pytest.approx(value, rel=1e-6)
