from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from passes_over import PassesOverStep3
from tiny_fit import TinyData, TinyModule, Watch, adamw, quiet_trainer
from tiny_gpt_run import SaveEveryMicroBatch, equal_bits, fit, tiny_module
from torch import Tensor, nn

from lit_stable.callbacks import (
    GradClip,
    GradSpikeSkip,
    InvariantCheck,
    LayerNormFreeze,
    OptimizerReset,
    Progress,
    QKClip,
    ScriptedSkip,
    UpdateClip,
)
from lit_stable.callbacks.attention_logits import largest_logits
from lit_stable.callbacks.base import MisconfigurationException

LOUD = 30.0  # factor on the projections of the first layer's first head, so that its logits are large


def loud(**config: Any) -> Any:
    """A GPT whose first head of the first layer has large logits."""
    module = tiny_module(**config)
    build = module.configure_model

    def configure_model() -> None:
        fresh = module.gpt is None
        build()
        if fresh:
            with torch.no_grad():
                module.gpt.blocks[0].attention.qkv.weight[: 2 * 16] *= LOUD

    module.configure_model = configure_model
    return module


class Logits(QKClip):
    """Writes down each head's largest logit in every measurement, and clips as it would."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.found: list[dict[str, list[float]]] = []

    state_key = "QKClip"

    def seen(self, trainer: Trainer) -> None:
        taken = self._watch.take
        self._watch.take = lambda: self._written(taken())  # type: ignore[method-assign]
        super().seen(trainer)
        del self._watch.take

    def _written(self, heads: dict[str, Tensor]) -> dict[str, Tensor]:
        self.found.append({name: largest.tolist() for name, largest in heads.items()})
        return heads


def test_a_heads_logits_shrink_to_the_threshold_and_no_other_head_is_touched() -> None:
    weights: list[dict[str, Tensor]] = []
    take = Watch("on_train_batch_end", lambda t, *_: weights.append(_copy(t)))
    loaded: list[dict[str, Tensor]] = []
    for action in ("log", "act"):
        clip = QKClip(threshold=5.0, every_steps=2, action=action)  # type: ignore[arg-type]
        fit(steps=2, module=loud(), callbacks=(clip, take), validates=False)
        loaded.append(weights[-1])
    raw, clipped = (w["gpt.blocks.0.attention.qkv.weight"] for w in loaded)
    ratio = (clipped / raw).reshape(2, 3, 16, -1)  # (heads, q k v, rows, D)
    assert torch.equal(ratio[1], torch.ones_like(ratio[1]))
    assert torch.equal(ratio[0, 2], torch.ones_like(ratio[0, 2]))
    assert 0 < float(ratio[0, 0].min()) < 0.5
    torch.testing.assert_close(ratio[0, 0], ratio[0, 1], rtol=1e-5, atol=0)
    others = [name for name in loaded[0] if name != "gpt.blocks.0.attention.qkv.weight"]
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in others)


def _copy(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.lightning_module is not None
    return {name: p.detach().clone() for name, p in trainer.lightning_module.named_parameters()}


def test_the_next_measurement_is_at_the_threshold() -> None:
    clip = Logits(threshold=5.0)
    run = fit(steps=3, module=loud(), callbacks=(clip,), validates=False)
    first, second = (found["gpt.blocks.0.attention"] for found in clip.found[1:])  # the first step has rate 0
    assert first[0] > 20
    assert second[0] < 7  # other samples, and a step in between
    assert float(run.trainer.callback_metrics["stability/qk_clipped_heads"]) >= 1
    assert float(run.trainer.callback_metrics["stability/qk_logit_max"]) == pytest.approx(
        max(v for heads in clip.found[-1].values() for v in heads)
    )


def test_grouped_queries_keep_the_logits_of_heads_below_the_threshold() -> None:
    clip = Logits(threshold=5.0)
    fit(steps=3, module=loud(n_head=4, n_kv_head=2, d_model=32), callbacks=(clip,), validates=False)
    before, after = (torch.tensor(found["gpt.blocks.0.attention"]) for found in clip.found[1:])
    above = before > 5.0
    assert above.any()
    assert not above.all()
    assert (after[above] < 7).all()
    torch.testing.assert_close(after[~above], before[~above], rtol=0.3, atol=0.3)


@pytest.mark.parametrize("every", [1, 3])
def test_below_the_threshold_and_between_measurements_no_bit_changes(every: int) -> None:
    clip = QKClip(threshold=1e6, every_steps=every)
    assert equal_bits(fit(steps=4, callbacks=(clip,)).weights, fit(steps=4).weights)


def test_only_logging_changes_no_bit() -> None:
    with_it = fit(steps=3, module=loud(), callbacks=(QKClip(threshold=5.0, action="log"),))
    assert equal_bits(with_it.weights, fit(steps=3, module=loud()).weights)
    assert float(with_it.trainer.callback_metrics["stability/qk_clipped_heads"]) >= 1


def test_a_resume_clips_the_same(tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        return fit(steps=4, module=loud(), **options)

    straight = run(callbacks=(QKClip(threshold=5.0), SaveEveryMicroBatch(tmp_path)))
    for micro in (3, 4, 9):  # within a window, at its end
        clip = QKClip(threshold=5.0)
        again = run(callbacks=(clip,), ckpt_path=tmp_path / f"m{micro}.ckpt")
        assert equal_bits(again.weights, straight.weights)
        assert clip.state_dict() == next(c for c in straight.trainer.callbacks if isinstance(c, QKClip)).state_dict()


# -- a stranger's attention --------------------------------------------------------------------------------------------


class Stranger(LightningModule):
    """Too small a rate to move a bit, unless another optimizer is asked for."""

    def __init__(self, make_optimizer: Any = None, overflow: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Heads()
        self.make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-30))
        self.overflow = overflow

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (self.attention(batch.repeat(1, 2)[:, None].expand(-1, 3, -1))).square().mean()

    def on_after_backward(self) -> None:
        if self.trainer.global_step in self.overflow:
            self.attention.v_proj.weight.grad.fill_(torch.inf)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Heads(nn.Module):
    """Four query heads of two, two key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, rows) for rows in (8, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        self.last = q, k
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_heads_that_were_only_said_to_be_scaled_are_not_counted_by_a_resume_that_acts(tmp_path: Path) -> None:
    said = QKClip(threshold=5.0, action="log")
    fit(steps=2, module=loud(), callbacks=(said, SaveEveryMicroBatch(tmp_path)), validates=False)
    known = said.state_dict()
    assert known["clipped"] == 0
    assert known["only_logged"] > 0  # not in the first step, whose rate is 0
    for action, seen in (("act", 0), ("log", known["only_logged"])):
        clip = QKClip(threshold=1e6, action=action)  # type: ignore[arg-type]
        run = fit(steps=3, module=loud(), callbacks=(clip,), ckpt_path=tmp_path / "m8.ckpt", validates=False)
        assert float(run.trainer.callback_metrics["stability/qk_clipped_heads"]) == seen
        assert clip.state_dict() == known
    old = QKClip()
    old.load_state_dict({"clipped": 3})
    assert old.state_dict() == {"clipped": 3, "only_logged": 0}


def test_two_projections_with_biases_and_shared_keys_are_scaled_exactly() -> None:
    module = Stranger()
    with torch.no_grad():
        module.attention.q_proj.weight *= 5
        module.attention.q_proj.bias *= 5
    largest: list[Tensor] = []
    clip = Watch("on_before_optimizer_step", lambda *_: largest.append(largest_logits(*module.attention.last)))
    quiet_trainer(QKClip(threshold=0.5), clip, max_steps=1).fit(module, TinyData())
    batch = next(iter(TinyData(resumes=False).train_dataloader()))  # the one that was measured
    module.attention(batch.repeat(1, 2)[:, None].expand(-1, 3, -1))
    now = largest_logits(*module.attention.last)
    expected = torch.where(largest[0] > 0.5, 0.5, largest[0])
    assert (largest[0] > 0.5).any()
    torch.testing.assert_close(now, expected, rtol=1e-5, atol=1e-6)


# -- steps that leave weights as they are ------------------------------------------------------------------------------

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])


def weights_after(module: LightningModule, *callbacks: Any, steps: int = 6, **options: Any) -> list[dict[str, Tensor]]:
    """The weights before the first step and after each; every head is above the threshold."""
    seen: list[dict[str, Tensor]] = []
    watches = [Watch(hook, lambda t, *_: seen.append(_copy(t))) for hook in ("on_train_start", "on_train_batch_end")]
    quiet_trainer(*callbacks, *watches, max_steps=steps, **options).fit(module, TinyData())
    return seen


def moved(seen: list[dict[str, Tensor]], name: str = "") -> list[int]:
    """Steps, counted from 1, in which any weight with such a name has changed."""
    pairs = enumerate(itertools.pairwise(seen), 1)
    return [step for step, (a, b) in pairs if any(not torch.equal(a[k], b[k]) for k in a if name in k)]


def scaler() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))]}


class WithholdsStep3(Stranger):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


SKIPS: dict[str, Any] = {
    "spike": lambda make: (Stranger(make, overflow=(2,)), [GradSpikeSkip()], {}),
    "scripted": lambda make: (Stranger(make), [ScriptedSkip([3])], {}),
    "clip": lambda make: (Stranger(make, overflow=(2,)), [GradClip(1e6)], {}),
    "recovery": lambda make: (Stranger(make), [PassesOverStep3()], {}),
    "scaler": lambda make: (Stranger(make, overflow=(2,)), [], scaler()),
    "scaler and clip": lambda make: (Stranger(make, overflow=(2,)), [GradClip(1e6)], scaler()),
    "withheld": lambda make: (WithholdsStep3(make), [], {}),
}


@both_kernels
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", SKIPS)
@pytest.mark.filterwarnings("ignore:GradSpikeSkip")
def test_in_a_skipped_step_no_bit_changes(kind: str, every: int, fused: bool) -> None:
    module, callbacks, options = SKIPS[kind](adamw(fused=fused, lr=1e-3))
    clip, counts = QKClip(threshold=1e-3, every_steps=every), []
    count = Watch("on_train_batch_end", lambda *_: counts.append(clip.state_dict()["clipped"]))
    seen = weights_after(module, *callbacks, clip, count, **options)
    assert moved(seen) == [1, 2, 4, 5, 6]
    assert counts[2] == counts[1] < counts[5]


def test_what_is_not_measured_is_not_scaled_with_the_factors_of_a_step_that_was_withheld() -> None:
    module = WithholdsStep3()
    seen = weights_after(module, QKClip(threshold=1e-3, every_steps=3))
    assert moved(seen) == [6]


@both_kernels
def test_held_at_rate_0_no_bit_changes(fused: bool) -> None:
    clip = QKClip(threshold=1e-3)
    seen = weights_after(Stranger(adamw(fused=fused)), OptimizerReset(start=2, hold_steps=2), clip)
    assert moved(seen) == [1, 2, 5, 6]


def test_a_rate_of_0_that_is_a_tensor_holds_too() -> None:
    rate = torch.tensor(0.0)
    assert moved(weights_after(Stranger(adamw(lr=rate, fused=True)), QKClip(threshold=1e-3))) == []


class TwoOptimizers(Stranger):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        of_keys = [self.attention.k_proj.bias]
        return [self.make_optimizer(p for p in self.parameters() if p is not of_keys[0]), self.make_optimizer(of_keys)]


def test_two_optimizers_that_step_together_are_one_step() -> None:
    measured: list[int] = []

    class Noting(QKClip):
        def seen(self, trainer: Trainer) -> None:
            measured.append(Progress.of(trainer).steps)

    quiet_trainer(Noting(threshold=0.1, every_steps=2), max_steps=12).fit(TwoOptimizers(), TinyData())
    assert measured == [2, 4, 6]


@pytest.mark.parametrize("for_good", [True, False], ids=["for good", "window"])
def test_what_is_frozen_keeps_every_bit_and_what_is_not_is_scaled(for_good: bool) -> None:
    rule: dict[str, Any] = {"modules": ["gpt.blocks.0*"], "norms": "with"}
    seen: list[dict[str, Tensor]] = []
    clip = QKClip(threshold=1e-3)
    own = (LayerNormFreeze([rule if for_good else {**rule, "start": 2}]), InvariantCheck(every_steps=1), clip)
    watch = Watch("on_train_batch_end", lambda t, *_: seen.append(_copy(t)) if t.global_step > len(seen) else None)
    fit(steps=4, callbacks=(*own, watch), validates=False)
    assert moved(seen[1:], "blocks.0.attention") == []
    assert moved(seen[1:], "blocks.1.attention") == [1, 2]


@pytest.mark.parametrize("frozen", ["q_proj.weight", "q_proj.bias", "k_proj.weight"])
def test_queries_and_keys_are_scaled_together_or_not_at_all(frozen: str) -> None:
    module = Stranger()
    dict(module.attention.named_parameters())[frozen].requires_grad_(False)
    assert moved(weights_after(module, QKClip(threshold=1e-3))) == []


def test_it_scales_what_a_clipped_update_has_left() -> None:
    def weights(*callbacks: Any) -> Tensor:
        module = Stranger(adamw(lr=0.1))
        return weights_after(module, *callbacks, steps=2)[-1]["attention.q_proj.weight"]

    unscaled, scaled = (weights(UpdateClip(0.1), *more) for more in ([], [QKClip(1e-3, every_steps=2)]))
    ratio = (scaled / unscaled).reshape(4, -1)
    assert (ratio < 0.5).any()
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5, atol=0)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "l2"])
def test_with_normalised_queries_and_keys_it_is_refused(norm: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"blocks\.0\.attention normalises queries or keys"):
        fit(steps=1, callbacks=(QKClip(),), qk_norm=norm)


def test_where_nothing_attends_that_it_knows_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="no module has q_proj and k_proj, or rows_of_heads"):
        quiet_trainer(QKClip(), max_steps=1).fit(TinyModule(), TinyData())


def test_an_attention_of_an_unknown_kind_beside_a_known_one_is_named() -> None:
    module = Stranger()
    module.other = Unknown()
    module.training_step = lambda batch, batch_idx=0: (
        module.attention(batch.repeat(1, 2)[:, None]).mean() + module.other(batch)
    )
    with pytest.raises(MisconfigurationException, match=r"other \(Unknown\) attends, and has neither"):
        quiet_trainer(QKClip(), max_steps=1).fit(module, TinyData())


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.weight)[None, None]
        return F.scaled_dot_product_attention(x, x, x).mean()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"threshold": 0.0}, r"QKClip\(threshold=0.0\)`: must be a finite number above 0"),
        ({"threshold": float("inf")}, r"threshold=inf"),
        ({"every_steps": 0}, r"QKClip\(every_steps=0\)`: must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        QKClip(**wrong)
