"""Every precision on one CUDA device, FSDP1 among the strategies; and no step of fp16 waits for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from no_sync import NoSync
from tiny_gpt_run import GLOBAL_BATCH, MICRO_BATCH, NumberedData, equal_bits, fit, tiny_module

from lit_stable.callbacks import AccumulationWindows, GradNorm, Progress, SafeCheckpoints, StepSeed
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.model.attention_dropout import drop_by_groups
from lit_stable.run.loss_scale_watch import LossScaleWatch
from lit_stable.strategies.fsdp1 import one_device_problem
from lit_stable.strategies.loss_scale import LossScale, LossScaler
from lit_stable.strategies.precisions import FP16, PRECISIONS, STRATEGIES, precision_problem
from lit_stable.strategies.selection import select

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CELLS = [(s, p) for s in STRATEGIES for p in PRECISIONS if precision_problem(s, p) is None]
REFUSED = [(s, p) for s, p in CELLS if s == "fsdp" and one_device_problem(p, 1)]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: slice, p: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


@pytest.mark.parametrize(("strategy", "precision"), [cell for cell in CELLS if cell not in REFUSED])
def test_every_cell_trains(strategy: str, precision: str) -> None:
    plain = fit(accelerator="gpu", steps=4, max_norm=None)
    run = fit(strategy, accelerator="gpu", steps=4, max_norm=None, precision=precision)
    losses = [torch.tensor([row[1] for row in each.rows]) for each in (run, plain)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0.02)
    if strategy != "fsdp":  # which keeps flat parameters
        stored = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert {p.dtype for p in run.module.parameters()} == {stored}
    assert isinstance(getattr(run.trainer.precision_plugin, "scaler", None), LossScaler) == (precision in FP16)


@pytest.mark.parametrize(("strategy", "precision"), REFUSED)
def test_what_fsdp_cannot_do_on_one_device_is_refused(strategy: str, precision: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{precision}: strategy fsdp on one device"):
        fit(strategy, accelerator="gpu", steps=4, max_norm=None, precision=precision)


@pytest.mark.parametrize(("strategy", "precision"), [("auto", "16-mixed"), ("fsdp2", "16-mixed"), ("fsdp2", "16-true")])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_step_in_fp16_waits_for_the_device_not_even_one_that_overflows(
    strategy: str, precision: str, dropout: float
) -> None:
    own = [GradNorm(), AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH), StepSeed(3), SafeCheckpoints(), LossScaleWatch()]
    options = {
        "accelerator": "gpu",
        "devices": 1,
        "strategy": strategy,
        "precision": precision,
        "max_steps": 10,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "use_distributed_sampler": False,
        "log_every_n_steps": 10,
        "callbacks": [Overflow(5), *own, NoSync(3, 8)],
    }
    trainer = Trainer(**select(options, loss_scale=LossScale(init=256.0)))
    trainer.fit(tiny_module(dropout=dropout), datamodule=NumberedData())
    assert (trainer.global_step, Progress.of(trainer).skipped) == (10, 1)
    assert trainer.precision_plugin.scaler.get_scale() == 128.0


class Overflow(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.step:
            gradient = next(p.grad for p in pl_module.parameters() if p.ndim == 2)
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(math.inf)


def test_attention_dropout_draws_alike_for_half_of_the_heads() -> None:
    q, k, v = (torch.randn(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.manual_seed(5)
    whole = drop_by_groups(causal, q, k, v, 0.3, groups=8, n_head=8)
    after = torch.rand(3, device="cuda")
    for first in (0, 4):
        parts = [t[:, first : first + 4] for t in (q, k, v)]
        torch.manual_seed(5)
        assert torch.equal(
            drop_by_groups(causal, *parts, 0.3, groups=8, n_head=8, first_head=first), whole[:, first : first + 4]
        )
        assert torch.equal(torch.rand(3, device="cuda"), after)


def test_a_switch_of_precision_in_mid_run_goes_on(tmp_path: Any) -> None:
    save = Save(tmp_path / "two.ckpt")
    straight = fit("fsdp2", accelerator="gpu", steps=4, max_norm=None, precision="16-mixed", callbacks=(save,))
    for precision in ("bf16-mixed", "32-true"):
        run = fit("fsdp2", accelerator="gpu", steps=4, max_norm=None, precision=precision, ckpt_path=save.path)
        assert [row[0] for row in run.rows] == [3, 4]
        torch.testing.assert_close(torch.tensor(run.rows), torch.tensor(straight.rows[2:]), rtol=0.05, atol=0.02)
        assert not equal_bits(run.weights, straight.weights)


class Save(Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if Progress.of(trainer).steps == 2 and not self.path.exists():
            trainer.save_checkpoint(self.path)
