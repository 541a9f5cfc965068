"""The scripts under ``benchmarks`` build and train what they time, at a toy size; what they time is nobody's test."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_the_trainer_and_the_plain_loop_take_turns(script: Any, tmp_path: Path) -> None:
    throughput = script("throughput")
    found, _ = throughput.contenders("tiny", str(tmp_path), 1, ["plain", "fit"])
    assert found.keys() == {throughput.OURS, throughput.PLAIN}
    assert all(contender.turn() > 0 for contender in found.values())
    assert found[throughput.OURS].contender.trainer.global_step == 2 * (throughput.UNCOUNTED + 1)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    {
        "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "matrix products",
        "void cublasLt::splitKreduce_kernel<32, 16, int>": "matrix products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
        "_losses_and_gradients": "head's loss",
        "triton_red_fused__log_softmax_prepare_softmax_online_15": "head's loss",
        "_slope": "GELU",
        "triton_poi_fused__unsafe_view_gelu_6": "GELU",
        "triton_per_fused__to_copy__unsafe_view_add_native_layer_norm_3": "norms",
        "triton_poi_fused__to_copy_t_4": "casts and copies",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda": "casts and copies",
        "triton_poi_fused__unsafe_view_add_6": "other",
    }.items(),
)
def test_a_kernel_is_of_the_kind_that_its_name_tells(script: Any, kernel: str, kind: str) -> None:
    assert script("kernels").kind_of(kernel) == kind


def test_gaps_between_kernels_are_short_and_under_no_other_kernel(script: Any) -> None:
    ends_late, within, next_one, after_a_wait = (0.0, 10.0), (2.0, 6.0), (11.5, 20.0), (200.0, 201.0)
    assert script("kernels").gaps([next_one, ends_late, after_a_wait, within]) == 1.5


def test_every_callback_is_timed_alone_and_all_together(script: Any, tmp_path: Path) -> None:
    callbacks = script("callbacks")
    options = {**callbacks.SIZES["tiny"], "data.global_batch": 2}
    built = callbacks.build(callbacks.CONFIGS, str(tmp_path), **options)
    found = callbacks.variants(built, built.model, True, 0, 1)
    assert found.keys() == {callbacks.NOTHING, *callbacks.ALONE, callbacks.AGAIN, callbacks.ALL}
    assert found[callbacks.ALL].turn() > 0


def test_the_lead_of_each_alarm_is_counted_to_the_loss_that_is_lost(script: Any) -> None:
    alarm_lead = script("alarm_lead")
    traces = sorted((FOLDER.parent / "tests" / "traces").glob("*.csv"))
    page = alarm_lead.page([alarm_lead.replayed(path) for path in traces])
    assert page[0].endswith("healthy: lives to step 1158")
    assert page[2].endswith("dies: loss lost at step 3575")
    assert page[-2] == "| slow_divergence | 1 | 1742 (1742 to 1742) | 0 |"
