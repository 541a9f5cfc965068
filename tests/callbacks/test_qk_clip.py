from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import SaveEveryMicroBatch, equal_bits, fit, tiny_module
from torch import Tensor, nn

from lit_stable.callbacks import QKClip
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
        clip = QKClip(threshold=5.0, action=action)  # type: ignore[arg-type]
        fit(steps=1, module=loud(), callbacks=(clip, take), validates=False)
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
    run = fit(steps=2, module=loud(), callbacks=(clip,), validates=False)
    first, second = (found["gpt.blocks.0.attention"] for found in clip.found)
    assert first[0] > 20
    assert second[0] < 7  # other samples, and a step in between
    assert float(run.trainer.callback_metrics["stability/qk_clipped_heads"]) >= 1
    assert float(run.trainer.callback_metrics["stability/qk_logit_max"]) == pytest.approx(
        max(v for heads in clip.found[-1].values() for v in heads)
    )


def test_grouped_queries_keep_the_logits_of_heads_below_the_threshold() -> None:
    clip = Logits(threshold=5.0)
    fit(steps=2, module=loud(n_head=4, n_kv_head=2, d_model=32), callbacks=(clip,), validates=False)
    before, after = (torch.tensor(found["gpt.blocks.0.attention"]) for found in clip.found)
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
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Heads()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.attention(batch.repeat(1, 2)[:, None].expand(-1, 3, -1))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


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
    assert known["only_logged"] >= 2
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
