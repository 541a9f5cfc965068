"""8-bit Adam in whole fits of one process. Resumed: test_eight_bit_resume.py; with several: tests/distributed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from eight_bit_models import OneRow, differing, eight_bit, fit_tiny, states_of
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from tiny_fit import (
    SaveAtSteps,
    TinyData,
    TinyModule,
    Watch,
    adamw,
    assert_same_bits,
    quiet_trainer,
    snapshot,
)
from tiny_gpt_run import fit
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from lit_stable.callbacks import (
    EightBitAdam,
    GradClip,
    GradSpikeSkip,
    LayerNormFreeze,
    OptimizerMonitor,
    OptimizerReset,
    Progress,
    SafeCheckpoints,
    UpdateClip,
)
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_optimizer import BlockwiseAdamW
from lit_stable.callbacks.eight_bit_states import fresh_state

CODES = {"step", "exp_avg_codes", "exp_avg_absmax", "exp_avg_sq_codes", "exp_avg_sq_absmax"}


# -- conversion --------------------------------------------------------------------------------------------------------


def test_the_fit_steps_in_8_bit_and_logs_what_a_parameter_takes() -> None:
    trainer = fit_tiny(eight_bit(), log_every_n_steps=1)
    (optimizer,) = trainer.optimizers
    module = trainer.lightning_module
    assert type(optimizer) is BlockwiseAdamW
    assert set(optimizer.state[module.net[0].weight]) == CODES
    assert optimizer.state[module.net[0].weight]["exp_avg_codes"].dtype == torch.uint8
    # (8, 4) in rows of 4, (4, 8) in rows of 8, and 12 biases in 32 bit.
    size = (32 * 2 + 8 * 8) + (32 * 2 + 4 * 8) + 12 * 8
    assert float(trainer.callback_metrics["stability/state_bytes_per_parameter"]) == pytest.approx(size / 76)
    bare = fit_tiny(SafeCheckpoints(), EightBitAdam(bits=32), log_every_n_steps=1)
    assert float(bare.callback_metrics["stability/state_bytes_per_parameter"]) == 8.0


def test_every_step_of_a_run_with_sequential_schedulers_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    step = BlockwiseAdamW._step_group
    monkeypatch.setattr(BlockwiseAdamW, "_step_group", lambda self, group: calls.append(1) or step(self, group))

    class Scheduled(TinyModule):
        def configure_optimizers(self) -> Any:
            self.made = super().configure_optimizers()
            self.groups = self.made.param_groups
            parts = [LinearLR(self.made, 0.5, total_iters=2), ConstantLR(self.made, 0.1, total_iters=9)]
            return [self.made], [{"scheduler": SequentialLR(self.made, parts, [2]), "interval": "step"}]

    module, rates = Scheduled(adamw(fused=False)), []
    watch = Watch("on_before_optimizer_step", lambda trainer, optimizer: rates.append(optimizer.param_groups[0]["lr"]))
    trainer = fit_tiny(eight_bit(), watch, module=module, max_steps=4)
    assert len(calls) == 4
    assert rates == pytest.approx([0.025, 0.0375, 0.005, 0.005])
    assert trainer.optimizers[0] is module.made
    assert trainer.optimizers[0].param_groups is module.groups


def test_the_table_is_printed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("lit_stable.callbacks.eight_bit_adam.rank_zero_info", lines.append)
    quiet_trainer(eight_bit(keep_32_bit=["net.3"]), max_steps=1).fit(TinyModule(), TinyData())
    (said,) = lines
    assert said.startswith("EightBitAdam, dynamic map\nstate ")
    rows = {line[:24].strip(): line[24:].split() for line in said.splitlines()[2:-1]}
    assert rows["8 bit: last block short"][:2] == ["1", "32"]
    assert rows["32 bit: keep_32_bit"][:2] == ["2", "36"]
    assert said.splitlines()[-1].endswith("less than moments in 32 bit")


class TwoOptimizers(TinyModule):
    """Adam for the first layer and SGD for the rest, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))  # type: ignore[arg-type]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters(), 0.05), torch.optim.SGD(self.net[3].parameters(), 0.1)


def test_other_optimizers_beside_it_stay_as_they_are() -> None:
    trainer = fit_tiny(eight_bit(), module=TwoOptimizers(), max_steps=4)
    module, (adam, sgd) = trainer.lightning_module, trainer.optimizers
    assert set(adam.state[module.net[0].weight]) == CODES
    assert type(sgd) is torch.optim.SGD
    assert float(adam.state[module.net[0].weight]["step"]) == 2.0


def test_stable_embeddings_of_bitsandbytes_stay_in_32_bit() -> None:
    class Stable(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = bitsandbytes.nn.StableEmbedding(4, 8)

    trainer = fit_tiny(eight_bit(), module=Stable(), max_steps=1)
    assert set(trainer.optimizers[0].state[trainer.lightning_module.table.weight]) == {"step", "exp_avg", "exp_avg_sq"}


# -- with the others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
def test_a_spike_is_skipped_in_the_kernel_and_changes_no_bit(fused: bool) -> None:
    """As a user writes it, fused or not: what is converted counts as fused, so no step waits to be told."""
    after: dict[int, Any] = {}
    watch = Watch("on_train_batch_end", lambda trainer, *rest: after.update({trainer.global_step: snapshot(trainer)}))
    skip = GradSpikeSkip(z_score=6.0, warmup_steps=2, window=8)
    module = TinyModule(adamw(lr=1e-3, fused=fused), poison={4: 1e5, 6: math.nan})
    trainer = fit_tiny(eight_bit(), skip, watch, GradClip(0.5), module=module, max_steps=8)
    for step in (5, 7):
        assert_same_bits(after[step], after[step - 1])
    assert differing(after[6], after[5])
    assert Progress.of(trainer).skipped == 2
    assert {float(s["step"]) for s in trainer.optimizers[0].state.values()} == {6.0}


@pytest.mark.filterwarnings("ignore:GradSpikeSkip")
def test_it_works_under_a_gradient_scaler() -> None:
    """The scaler leaves the division and its own skip to the kernel."""

    class InFP32(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            with torch.autocast("cpu", enabled=False):
                return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            if self.trainer.global_step == 2 and self.trainer.precision_plugin.precision == "16-mixed":
                self.net[0].weight.grad.fill_(math.inf)

    def run(**options: Any) -> tuple[Any, dict[int, Any]]:
        after: dict[int, Any] = {}
        watch = Watch("on_train_batch_end", lambda t, *rest: after.update({t.global_step: snapshot(t)}))
        return fit_tiny(eight_bit(), watch, module=InFP32(adamw(lr=1e-3)), max_steps=4, **options), after

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    _, scaled = run(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    _, plain = run()
    assert_same_bits(scaled[3], scaled[2])
    assert_same_bits(scaled[2], plain[2])  # 256 is a power of two
    assert scaler.get_scale() == 128.0


def test_a_reset_leaves_the_state_of_a_fresh_optimizer_bit_for_bit() -> None:
    found: list[Any] = []

    def note(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 2:
            found.append([dict(s) for s in states_of(trainer).values()])

    reset = OptimizerReset(start=2, hold_steps=2)
    watch = Watch("on_before_backward", note)
    trainer = fit_tiny(eight_bit(), reset, watch, max_steps=4)
    fresh = [fresh_state(p, 8 if p.ndim == 2 else 32) for p in trainer.lightning_module.parameters()]
    assert_same_bits(found[0], fresh)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            UpdateClip(),
            r"`UpdateClip`: BlockwiseAdamW keeps moments in 8 bit \(`EightBitAdam`\), rounded after the step",
        ),
        (OptimizerMonitor(), r"`OptimizerMonitor`: BlockwiseAdamW keeps no exp_avg and exp_avg_sq in floating point"),
    ],
    ids=["UpdateClip", "OptimizerMonitor"],
)
def test_those_that_read_32_bit_moments_say_so_at_the_start_and_run_with_bits_32(other: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit_tiny(eight_bit(), other)
    assert fit_tiny(EightBitAdam(bits=32), type(other)()).global_step == 4


def test_a_parameter_whose_gradient_is_dropped_keeps_weight_and_moments() -> None:
    rules: Any = [{"modules": ["net.0"], "norms": "with", "start": 1, "stop": 3}]
    after: dict[int, Any] = {}
    watch = Watch("on_train_batch_end", lambda trainer, *rest: after.update({trainer.global_step: states_of(trainer)}))
    fit_tiny(eight_bit(), LayerNormFreeze(rules), watch, max_steps=4)
    for name in ("net.0.weight", "net.0.bias"):
        assert_same_bits(after[3][name], after[1][name])
        assert differing(after[4][name], after[3][name])
    assert differing(after[2]["net.3.weight"], after[1]["net.3.weight"])


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    runs = [snapshot(fit_tiny(eight_bit(), *savers)) for savers in ([], [SaveAtSteps(tmp_path)])]
    assert_same_bits(runs[1], runs[0])
    saved = torch.load(tmp_path / "start.ckpt", weights_only=True)["optimizer_states"][0]
    assert [float(s["step"]) for s in saved["state"].values()] == [0.0] * 4
    assert saved["param_groups"][0]["state_map"] == "dynamic"


def test_a_gpt_learns_as_in_32_bit() -> None:
    """Ten steps, in which the loss falls by a fifth."""
    wide, narrow = fit(steps=10), fit(steps=10, callbacks=(eight_bit(),))
    losses = [torch.tensor([row[1] for row in run.rows]) for run in (wide, narrow)]
    assert losses[0][-1] < 0.82 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0.01)
    kept = narrow.trainer.optimizers[0].state
    assert sum("exp_avg_codes" in state for state in kept.values()) == 8
    assert set(kept[narrow.module.gpt.wte.weight]) == {"step", "exp_avg", "exp_avg_sq"}  # tied to the head


@pytest.mark.parametrize(("state_map", "small"), [("dynamic", 1e-4), ("dynamic", 4e-4), ("linear", 0.04)])
def test_weights_whose_second_moment_is_lost_move_no_further_than_in_32_bit(state_map: Any, small: float) -> None:
    """With a second moment of zero they move by 4,200, 18,000 and 1,860,000 rates: by the first one over eps."""
    lost = []

    def lose(trainer: Trainer, *rest: Any) -> None:
        state = trainer.optimizers[0].state[trainer.lightning_module.net.weight]
        if trainer.global_step == 1 and "exp_avg_codes" in state:
            # As CUDA rounds it. On a CPU bitsandbytes' table has no such code of the dynamic map; a load has.
            state["exp_avg_sq_codes"][:, 1:] *= state_map == "linear"
            lost.append((state["exp_avg_sq_codes"] == 0).sum() * (state["exp_avg_codes"] > 128).all())

    moved = []
    for callback in (eight_bit(state_map=state_map), EightBitAdam(bits=32)):
        module = fit_tiny(callback, Watch("on_train_batch_end", lose), module=OneRow(small), max_steps=3)
        moved.append((module.lightning_module.after[2] - module.lightning_module.after[1]).abs()[0, 1:] / 1e-3)
    assert [int(number) for number in lost] == [255]
    assert moved[1].max() < 1.0
    assert (moved[0] < 1.2 * moved[1]).all()  # a first moment is rounded too
    assert moved[0].min() > 0.1


def test_weights_that_no_gradient_meets_stay_though_others_of_their_block_move() -> None:
    trainer = fit_tiny(eight_bit(), module=(module := OneRow(0.0)), max_steps=4)
    moved = trainer.lightning_module.net.weight != module.after[0]
    assert moved.nonzero().tolist() == [[0, 0]]
