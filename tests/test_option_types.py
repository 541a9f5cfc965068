from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.model.config import GPTConfig
from lit_stable.optim.options import OptimizerOptions, PatternOptions
from lit_stable.optim.schedule import LRSchedule
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.surgery import SurgeryOptions
from lit_stable.strategies.loss_scale import LossScale
from lit_stable.strategies.mesh import MeshOptions
from lit_stable.vlm.options import GatedOptions, VisionOptions

SIZES = {"vocab_size": 16, "n_layer": 1, "n_head": 2, "d_model": 8, "max_length": 8}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MeshOptions(replicate="2"), "mesh.replicate='2': must be a whole number."),
        (lambda: LossScale(window=2.5), "loss_scale.window=2.5: must be a whole number."),
        (lambda: OptimizerOptions(betas=("a", 0.9)), "optimizer.betas[0]='a': must be a number."),
        (lambda: PatternOptions(lr_factor="2"), "`PatternOptions(lr_factor='2')`: must be a number."),
        (lambda: LRSchedule(peak="1e-3"), "schedule.peak='1e-3': must be a number."),
        (lambda: GPTConfig(**{**SIZES, "n_layer": "2"}), "model.gpt.n_layer='2': must be a whole number."),
        (lambda: GPTConfig(**SIZES, tied=1), "model.gpt.tied=1: must be True or False."),  # of the class itself
        (lambda: GPTConfig(**SIZES, document_mask="no"), "model.gpt.document_mask='no': must be True or False."),
        (lambda: GatedOptions(every="2"), "model.gated.every='2': must be a whole number."),
        (lambda: VisionOptions(patch=None), "model.vision.patch=None: must be a whole number."),
        (lambda: SurgeryOptions(insert="qk_norm"), "surgery.insert='qk_norm': must be a list of qk_norm, embed_norm."),
        (
            lambda: Checkpoints(every_steps=2.5, keep_last=0, keep_best="yes"),
            "checkpoints.every_steps=2.5: must be a count of steps, samples or tokens, as 500 or 2M tokens.\n"
            "checkpoints.keep_last=0: must be at least 1.\n"
            "checkpoints.keep_best='yes': must be True or False.",
        ),
    ],
)
def test_an_option_of_another_type_is_refused_where_it_is_given(make: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException)) as caught:
        make()
    assert str(caught.value) == said


def test_patterns_may_be_written_as_mappings() -> None:
    options = OptimizerOptions(patterns={"wte.weight": {"lr_factor": 2}})
    assert options.patterns == {"wte.weight": PatternOptions(lr_factor=2)}
