"""The matrix of precisions and strategies: every cell trains, with its dtypes where they are claimed, or is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from tiny_gpt_run import MICRO_BATCH, NumberedData, fit, tiny_module

from lit_stable.callbacks import AccumulationWindows
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.module import GPTModule
from lit_stable.optim.schedule import LRSchedule
from lit_stable.strategies.loss_scale import LossScale, LossScaler
from lit_stable.strategies.precisions import FP16, PRECISIONS, STRATEGIES, full_name, precision_problem

DOCS = Path(__file__).parents[2] / "docs" / "strategies.md"
COMPUTE = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}
CELLS = [(strategy, precision) for strategy in STRATEGIES for precision in PRECISIONS]


class Probe(Callback):
    """Dtypes inside the first block's MLP, of a norm's gain as it is used, and of stored gradients."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.dtype] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        block = pl_module.gpt.blocks[0]
        block.mlp.up.register_forward_hook(self._note("compute", lambda module, output: output.dtype))
        block.mlp_norm.register_forward_hook(self._note("norm", lambda module, output: module.weight.dtype))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.seen["gradients"] = pl_module.gpt.blocks[0].mlp.up.weight.grad.dtype

    def _note(self, name: str, look: Any) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self.seen[name] = look(module, output)

        return hook


@pytest.mark.parametrize(("strategy", "precision"), CELLS)
def test_every_cell_trains_as_claimed_or_is_refused(strategy: str, precision: str) -> None:
    probe = Probe()
    options = {"steps": 2, "n_layer": 1, "max_norm": None, "precision": precision, "callbacks": (probe,)}
    problem = precision_problem(strategy, precision)
    if problem is not None:
        with pytest.raises(MisconfigurationException, match=re.escape(problem)):
            fit(strategy, **options)
        return
    if strategy == "fsdp":
        with pytest.raises(ValueError, match=r"fsdp.* GPU accelerator"):
            fit(strategy, **options)
        return
    run = fit(strategy, **options)
    stored = torch.bfloat16 if precision == "bf16-true" else torch.float32
    compute = COMPUTE.get(precision, torch.float16)
    assert run.trainer.precision == precision
    assert probe.seen == {"compute": compute, "norm": stored, "gradients": stored}
    assert {p.dtype for p in run.module.parameters()} == {stored}
    assert all(math.isfinite(row[1]) for row in run.rows)
    scaler = getattr(run.trainer.precision_plugin, "scaler", None)
    assert isinstance(scaler, LossScaler) if precision in FP16 else scaler is None


def test_the_table_in_the_docs_is_the_matrix() -> None:
    rows = [line.strip("|").split("|") for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    header = next(line for line in DOCS.read_text().splitlines() if line.startswith("| `trainer.precision`"))
    strategies = re.findall(r"`(\w+)`", header.split("|", 2)[2])
    assert tuple(strategies) == STRATEGIES
    table = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows if row[0].strip(" `") in PRECISIONS}
    assert tuple(table) == PRECISIONS
    refused = {
        (s, p) for p, cells in table.items() for s, cell in zip(STRATEGIES, cells, strict=True) if cell == "refused"
    }
    assert refused == {(s, p) for s, p in CELLS if precision_problem(s, p)}
    scaled = {p for p, cells in table.items() if any("scale" in cell for cell in cells)}
    assert scaled == set(FP16)


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine", 64, "fp8"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_other_precision_is_refused_with_the_list(strategy: str, precision: str | int) -> None:
    assert precision_problem(strategy, precision) == (
        f"trainer.precision={precision}: must be one of 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true."
    )


def test_lightnings_short_names_mean_what_they_mean_there() -> None:
    assert [full_name(name) for name in (None, 32, "32", 16, "16", "bf16", "bf16-true")] == [
        *["32-true"] * 3,
        *["16-mixed"] * 2,
        *["bf16-mixed", "bf16-true"],
    ]


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_bf16_true_is_warned_of(strategy: str) -> None:
    with pytest.warns(UserWarning, match=r"precision=bf16-true: .* a norm gain stays at exactly 1\.0 for ever"):
        fit(strategy, steps=1, n_layer=1, precision="bf16-true")


def test_norm_gains_move_in_bf16_mixed_and_stay_at_one_in_bf16_true() -> None:
    """What the warning says, seen at a learning rate of 1e-3."""

    def gain(precision: str) -> torch.Tensor:
        module = GPTModule(tiny_module(n_layer=1).config, LRSchedule(peak=1e-3, warmup=0, horizon=100))
        return fit(steps=4, module=module, precision=precision).weights["gpt.norm.weight"]

    assert (gain("bf16-mixed") != 1).all()
    assert (gain("bf16-true") == 1).all()


class Dtypes(Callback):
    """What the loss, the norms, the moments and the gradients of an open window are in."""

    def __init__(self) -> None:
        self.seen: dict[str, set[torch.dtype]] = {name: set() for name in ("loss", "norm", "gradients", "moments")}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        note = lambda module, *rest: self.seen["norm"].add(module.weight.dtype)  # noqa: E731
        pl_module.gpt.norm.register_forward_hook(note)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        self.seen["loss"].add(loss.dtype)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *rest: Any) -> None:
        self.seen["gradients"] |= {p.grad.dtype for p in pl_module.parameters() if p.grad is not None}
        states = trainer.optimizers[0].state.values()
        self.seen["moments"] |= {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_bf16_mixed_accumulates_normalises_and_counts_the_loss_in_fp32(strategy: str) -> None:
    fit(strategy, steps=1, n_layer=1, precision="bf16-mixed", callbacks=(dtypes := Dtypes(),))
    assert dtypes.seen == {name: {torch.float32} for name in dtypes.seen}


def test_a_hundred_steps_at_a_small_rate_learn_in_bf16_mixed_as_in_fp32_and_far_less_in_bf16_true() -> None:
    """At 1e-5 an update is below the rounding step of a bf16 weight above 0.02."""

    def learned(precision: str) -> float:
        module = GPTModule(tiny_module(n_layer=1).config, LRSchedule(peak=1e-5, warmup=0, horizon=8000))
        windows = AccumulationWindows(MICRO_BATCH, MICRO_BATCH)
        losses = [row[1] for row in fit(steps=100, module=module, precision=precision, windows=windows).rows]
        return sum(losses[:20]) / 20 - sum(losses[-20:]) / 20

    exact, mixed, rounded = (learned(precision) for precision in ("32-true", "bf16-mixed", "bf16-true"))
    assert mixed == pytest.approx(exact, rel=0.02)
    assert rounded < 0.6 * exact


def test_a_module_in_a_foreign_trainer_refuses_too() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, precision="16-true", max_steps=1, logger=False, barebones=True)
    with pytest.raises(MisconfigurationException, match=r"16-true: strategy SingleDeviceStrategy would store"):
        trainer.fit(tiny_module(), datamodule=NumberedData())


#: 65504 is the largest number of fp16; bf16 has the range of fp32. (precision, strategy, a value, whether it is held)
RANGES = [
    ("bf16-mixed", "auto", 7e4, True),
    ("bf16-mixed", "fsdp2", 7e4, True),
    ("16-mixed", "auto", 7e4, False),
    ("16-mixed", "fsdp2", 7e4, False),
    ("16-true", "fsdp2", 7e4, False),
    ("16-mixed", "auto", 65504.0, True),
    ("16-true", "fsdp2", 65504.0, True),
]


@pytest.mark.parametrize(("precision", "strategy", "value", "holds"), RANGES)
def test_what_fp16_cannot_hold_is_an_overflow_there_and_a_number_in_bf16(
    precision: str, strategy: str, value: float, holds: bool
) -> None:
    """A bias that makes one unit of the first block's output so large."""
    outputs: list[float] = []

    class Large(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            down = pl_module.gpt.blocks[0].mlp.down
            with torch.no_grad():
                bias = down.bias.to_local() if hasattr(down.bias, "to_local") else down.bias
                bias[0] = value
            down.register_forward_hook(lambda module, inputs, output: outputs.append(output.abs().max().item()))

    probe, scale = Large(), LossScale(init=4.0)
    options = {"n_layer": 1, "bias": True, "max_norm": None, "validates": False, "callbacks": (probe,)}
    run = fit(strategy, precision=precision, loss_scale=scale, steps=1, **options)
    assert all(math.isfinite(output) for output in outputs) == holds
    assert max(outputs) == pytest.approx(value, rel=1e-2) or not holds
    assert {int(state["step"]) for state in run.trainer.optimizers[0].state.values()} == {int(holds)}
    scaler = getattr(run.trainer.precision_plugin, "scaler", None)
    assert (scaler and scaler.get_scale()) == (None if precision not in FP16 else 4.0 if holds else 2.0)
