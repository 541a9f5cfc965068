"""16 bits as a policy: what each precision gathers, computes and reduces in."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies.fsdp2_precision import FSDP2Precision, as_policy
from lit_stable.strategies.loss_scale import LossScale, LossScaler


@pytest.mark.parametrize(
    ("precision", "compute", "reduce"),
    [
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("16-mixed", torch.float16, torch.float32),
        ("16-true", torch.float16, torch.float16),
    ],
)
def test_a_precision_is_a_policy_and_no_autocast(precision, compute, reduce):
    plugin = FSDP2Precision(precision, device="cpu")
    assert plugin.precision == precision
    assert (plugin.policy.param_dtype, plugin.policy.reduce_dtype) == (compute, reduce)
    assert not plugin.policy.cast_forward_inputs
    with plugin.forward_context():
        assert not torch.is_autocast_enabled("cpu")
    assert (plugin.scaler is None) == (precision == "bf16-mixed")
    if plugin.scaler is not None:
        assert plugin.scaler.over_ranks


def test_lightnings_plugins_are_translated():
    bf16 = as_policy(MixedPrecision("bf16-mixed", "cpu"), "cpu")
    assert (type(bf16), bf16.precision, bf16.scaler) == (FSDP2Precision, "bf16-mixed", None)
    fp16 = as_policy(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0)), "cpu")
    assert (type(fp16), fp16.precision) == (FSDP2Precision, "16-mixed")
    assert isinstance(fp16.scaler, LossScaler)
    assert (fp16.scaler.get_scale(), fp16.scaler.over_ranks) == (8.0, True)
    true = as_policy(HalfPrecision("16-true"), "cpu")
    assert (type(true), true.precision, true.scaler.policy) == (FSDP2Precision, "16-true", LossScale())


@pytest.mark.parametrize("plugin", [None, Precision(), HalfPrecision("bf16-true"), FSDP2Precision("16-true")])
def test_what_needs_no_translation_stays(plugin):
    assert as_policy(plugin, "cpu") is plugin


def test_another_precision_is_refused():
    with pytest.raises(
        MisconfigurationException,
        match=r"precision=64-true: strategy fsdp2 takes 32-true, bf16-true or bf16-mixed, 16-mixed, 16-true\.",
    ):
        as_policy(DoublePrecision(), "cpu")
