"""8-bit Adam goes on: from checkpoints of its own and of others, and in a second fit of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from eight_bit_models import differing, eight_bit, fit_tiny, states_of
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, snapshot
from torch.optim.lr_scheduler import ConstantLR

from lit_stable.callbacks import EightBitAdam, Progress, SafeCheckpoints
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_optimizer import BlockwiseAdamW
from lit_stable.callbacks.eight_bit_states import convert


class Keeping(TinyModule):
    """Makes its optimizer once."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "made"):
            self.made = super().configure_optimizers()
        schedule = ConstantLR(self.made, 0.5, total_iters=99)
        return [self.made], [{"scheduler": schedule, "interval": "step"}]


def test_an_optimizer_that_the_module_keeps_goes_on_in_a_second_fit() -> None:
    twice = Keeping()
    fit_tiny(eight_bit(), module=twice, max_steps=2)
    first = copy.deepcopy(dict(twice.made.state[twice.net[0].weight]))
    found: list[Any] = []
    note = Watch(
        "on_train_start", lambda t, *rest: found.append(copy.deepcopy(dict(t.optimizers[0].state[twice.net[0].weight])))
    )
    trainer = quiet_trainer(eight_bit(), note, max_steps=2)
    trainer.fit(twice, TinyData(resumes=False))
    assert_same_bits(found[0], first)
    assert (type(twice.made), trainer.optimizers[0]) == (BlockwiseAdamW, twice.made)
    assert {float(s["step"]) for s in twice.made.state.values()} == {4.0}


@pytest.mark.parametrize("then", [{"bits": 32}, {"state_map": "linear"}], ids=str)
def test_what_it_has_learned_is_converted_where_the_second_fit_says_otherwise(then: dict[str, Any]) -> None:
    module = Keeping()
    fit_tiny(eight_bit(), module=module, max_steps=2)
    weight, found = module.net[0].weight, []
    before = convert(weight, dict(module.made.state[weight]), 32, "dynamic")
    note = Watch("on_train_start", lambda t, *rest: found.append(copy.deepcopy(dict(t.optimizers[0].state[weight]))))
    quiet = quiet_trainer(eight_bit(**then), note, max_steps=1)
    quiet.fit(module, TinyData(resumes=False))
    after = convert(weight, found[0], 32, "dynamic", from_map=then.get("state_map", "dynamic"))
    assert float(after["step"]) == 2.0
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=0.01 * float(before[key].abs().max()))
        assert before[key].any()


def test_a_checkpoint_of_adamw_is_refused_in_a_sentence_or_converted_and_back(tmp_path: Path) -> None:
    plain = fit_tiny(Progress(), SafeCheckpoints(), max_steps=2)
    plain.save_checkpoint(tmp_path / "32.ckpt")
    with pytest.raises(
        MisconfigurationException, match=r"32 bit to 8 bit \(dynamic\): net.0.weight, net.3.weight; set"
    ):
        fit_tiny(Progress(), eight_bit(), resume=tmp_path / "32.ckpt")
    narrow = fit_tiny(Progress(), eight_bit(on_load="convert"), resume=tmp_path / "32.ckpt", max_steps=3)
    assert {float(s["step"]) for s in states_of(narrow).values()} == {3.0}
    narrow.save_checkpoint(tmp_path / "8.ckpt")
    with pytest.raises(MisconfigurationException, match=r"its optimizer state is in 8 bit, and AdamW reads 32; add"):
        fit_tiny(Progress(), SafeCheckpoints(), resume=tmp_path / "8.ckpt")
    wide = fit_tiny(Progress(), EightBitAdam(bits=32, on_load="convert"), resume=tmp_path / "8.ckpt", max_steps=3)
    wide.save_checkpoint(tmp_path / "wide.ckpt")
    last = fit_tiny(Progress(), SafeCheckpoints(), resume=tmp_path / "wide.ckpt", max_steps=3)
    assert not differing(states_of(last), states_of(wide))


def test_the_linear_map_resumes_bit_for_bit_and_another_is_refused_or_converted(tmp_path: Path) -> None:
    linear = {"state_map": "linear"}
    straight = fit_tiny(Progress(), eight_bit(**linear), SaveAtSteps(tmp_path))
    path = tmp_path / "micro-2.ckpt"
    assert_same_bits(snapshot(fit_tiny(Progress(), eight_bit(**linear), resume=path)), snapshot(straight))
    with pytest.raises(
        MisconfigurationException, match=r"8 bit \(linear\) to 8 bit \(dynamic\): net.0.weight, .*; set"
    ):
        fit_tiny(Progress(), eight_bit(), resume=path)
    note, found = Watch("on_train_start", lambda t, *rest: found.append(snapshot(t)["optimizer"])), []
    other = fit_tiny(Progress(), eight_bit(on_load="convert"), note, resume=path)
    assert other.optimizers[0].param_groups[0]["state_map"] == "dynamic"
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    weight = other.lightning_module.net[0].weight
    wide = [convert(weight, state[0], 32, "dynamic", m) for state, m in ((found[0], "dynamic"), (saved, "linear"))]
    assert wide[1]["exp_avg"].any()
    torch.testing.assert_close(wide[0]["exp_avg"], wide[1]["exp_avg"], rtol=0.05, atol=1e-4)
