from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import TinyData, TinyModule, Watch, adamw, quiet_trainer
from torch import nn

from lit_stable.callbacks import AccumulationWindows, GradClip, GradNorm, global_grad_norm


def parameter(values: list[float] | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(1 if values is None else len(values), dtype=dtype))
    if values is not None:
        made.grad = torch.tensor(values, dtype=dtype)
    return made


def test_is_the_root_of_the_sum_of_all_squares() -> None:
    assert global_grad_norm([parameter([1.0, 2.0]), parameter([2.0]), parameter([4.0])]).item() == 5.0


def test_a_missing_gradient_counts_as_zero() -> None:
    assert global_grad_norm([parameter([3.0, 4.0]), parameter(None)]).item() == 5.0
    assert global_grad_norm([parameter(None)]).item() == 0.0
    assert global_grad_norm([]).item() == 0.0


def test_bf16_gradients_are_summed_in_fp32() -> None:
    # 2^14 ones: a bf16 sum of squares would stop at 256. The second pair differs by one part in 2^10, below bf16's.
    ones = parameter([1.0] * (1 << 14), torch.bfloat16)
    norm = global_grad_norm([ones])
    assert norm.dtype == torch.float32
    assert norm.item() == 128.0
    assert global_grad_norm([ones, parameter([4.0], torch.bfloat16)]).item() == pytest.approx(
        math.sqrt(16400), rel=1e-7
    )


def test_mixed_dtypes_are_one_norm() -> None:
    assert global_grad_norm([parameter([3.0]), parameter([4.0], torch.bfloat16)]).item() == 5.0


def test_large_bf16_gradients_do_not_overflow() -> None:
    assert global_grad_norm([parameter([3e18], torch.bfloat16)]).item() == pytest.approx(3e18, rel=2**-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_it_non_finite(bad: float) -> None:
    assert not torch.isfinite(global_grad_norm([parameter([1.0, bad]), parameter([1.0])]))


def test_equals_torchs_own_norm_and_changes_no_gradient() -> None:
    module = TinyModule()
    module.net(torch.randn(3, 4)).square().sum().backward()
    before = [p.grad.clone() for p in module.parameters()]
    norm = global_grad_norm(module.parameters())
    assert all(torch.equal(p.grad, b) for p, b in zip(module.parameters(), before, strict=True))
    torch.testing.assert_close(norm, nn.utils.get_total_norm(before), rtol=1e-6, atol=0)


def test_the_inf_norm_is_the_largest_absolute_value() -> None:
    several = [parameter([1.0, -7.0]), parameter([2.0], torch.bfloat16), parameter(None), parameter([])]
    several[3].grad = torch.zeros(0)
    norm = global_grad_norm(several, norm_type="inf")
    assert norm.item() == 7.0
    assert norm.dtype == torch.float32
    assert global_grad_norm([parameter(None)], norm_type="inf").item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_element_makes_the_inf_norm_infinite(bad: float, place: int) -> None:
    several = [parameter([1.0]), parameter([2.0])]
    several[place].grad = torch.tensor([bad])
    assert global_grad_norm(several, norm_type="inf").item() == math.inf


def test_of_installs_itself_once() -> None:
    trainer = quiet_trainer()
    assert GradNorm.of(trainer) is GradNorm.of(trainer) is trainer.callbacks[0]


def logged_norms(folder: Path, *callbacks: Any, fused: bool = True, **options: Any) -> list[float]:
    logger = CSVLogger(folder, name="run")
    trainer = quiet_trainer(*callbacks, logger=logger, log_every_n_steps=1, **options)
    trainer.fit(TinyModule(adamw(fused=fused)), TinyData())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    return [float(row.split(",")[header.split(",").index("stability/grad_norm")]) for row in rows]


@pytest.mark.parametrize("fused", [True, False])
def test_is_logged_before_clipping(fused: bool, tmp_path: Path) -> None:
    first = logged_norms(tmp_path / "a", GradNorm(), max_steps=1)
    clipped = logged_norms(tmp_path / "b", GradClip(1e-3), max_steps=1, fused=fused)
    assert clipped == first
    assert first[0] > 0.1


def test_is_taken_once_per_optimizer_step_over_the_whole_window() -> None:
    norms: list[float] = []
    expected: list[float] = []

    def note(trainer: Any, optimizer: Any) -> None:
        norms.append(float(GradNorm.of(trainer).value))
        expected.append(float(nn.utils.get_total_norm([p.grad for p in trainer.lightning_module.parameters()])))

    watch = Watch("on_before_optimizer_step", note)
    trainer = quiet_trainer(GradNorm(), AccumulationWindows(6, 2), watch, max_steps=3)
    trainer.fit(TinyModule(), TinyData())
    assert norms == pytest.approx(expected, rel=1e-6)
    assert len(norms) == 3


def test_each_norm_is_of_the_optimizer_that_it_is_asked_for() -> None:
    shared = GradNorm()
    first, second = ([parameter([3.0, 4.0]), parameter([1.0])], [parameter([0.0]), parameter([2.0]), parameter([5.0])])
    optimizers = [torch.optim.SGD(parameters, lr=1.0) for parameters in (first, second)]
    for _ in range(2):
        assert [shared.measure_each(o).tolist() for o in optimizers] == [[5.0, 1.0], [0.0, 2.0, 5.0]]
    second[0].grad.fill_(1.0)
    assert shared.measure_each(optimizers[1]).tolist() == [0.0, 2.0, 5.0]  # as it was when first asked in the step


def test_nothing_is_kept_after_the_fit() -> None:
    trainer = quiet_trainer(GradNorm(), max_steps=1)
    trainer.fit(TinyModule(), TinyData())
    assert GradNorm.of(trainer).value is None


def test_double_gradients_are_measured_in_fp32_and_sparse_ones_by_their_rows() -> None:
    double = parameter([3.0, 4.0], torch.float64)
    sparse = nn.Parameter(torch.zeros(3, 2))
    rows = torch.tensor([[1, 1]])  # a row that occurs twice is one gradient, the sum
    sparse.grad = torch.sparse_coo_tensor(rows, torch.tensor([[4.0, 0.0], [8.0, 0.0]]), (3, 2))
    assert global_grad_norm([double]).dtype == torch.float32
    assert global_grad_norm([double, sparse]).item() == 13.0
    assert global_grad_norm([double, sparse], norm_type="inf").item() == 12.0
