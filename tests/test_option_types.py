from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.cli.published import Published
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.epochs import SampleOrder
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.sources import Source
from lit_stable.data.weights import WeightSchedule
from lit_stable.model.config import GPTConfig
from lit_stable.module import GPTModule
from lit_stable.optim.options import OptimizerOptions, PatternOptions
from lit_stable.optim.schedule import LRSchedule
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.session import RunOptions
from lit_stable.run.surgery import SurgeryOptions
from lit_stable.strategies.fsdp2 import FSDP2Strategy
from lit_stable.strategies.loss_scale import LossScale
from lit_stable.strategies.mesh import MeshOptions
from lit_stable.vlm.datamodule import PairDataModule
from lit_stable.vlm.module import VLMModule
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
        (lambda: Published("1B", "4"), "published.d_ff_ratio='4': must be a number, or None."),
        (lambda: RunOptions(name=3), "run.name=3: must be a string, or None."),
        (lambda: Source(path="a", weight="1"), "`Source(weight='1')`: must be a number."),
        (lambda: SampleOrder(buffer_shards=2.5), "data.order.buffer_shards=2.5: must be a whole number."),
        (lambda: MaskRepeats(min_count=None), "data.mask_repeats.min_count=None: must be a whole number."),
        (lambda: WeightSchedule([0, 1]), "data.weight_schedule.marks=[0, 1]: must be a mapping."),
        (
            lambda: FSDP2Strategy(tensor_parallel="2", timeout_minutes=None),
            "mesh.tensor_parallel='2': must be a whole number.\n"
            "`FSDP2Strategy(timeout_minutes=None)`: must be a number.",
        ),
        (
            lambda: TokenDataModule({"a": Source("a")}, 8, "8x", 0, order="date", average_over="words"),
            "data.micro_batch='8x': must be a whole number.\n"
            "data.order='date': must be `SampleOrder(by, shard_windows, buffer_shards, reshuffle)`, or a mapping with"
            " some of these keys.\n"
            "data.average_over='words': must be one of micro_batches, tokens.",
        ),
        (lambda: TokenDataModule(["a"], 8, 8, 8), "data.sources=['a']: must be a mapping."),
        (lambda: TokenDataModule({"a": {"path": 3}}, 8, 8, 8), "data.sources['a']['path']=3: must be a string."),
        (
            lambda: PairDataModule(8, "4", 8, words="all", image_size=9),
            "data.image_size=9, channels=1: the digits have 8 pixels and 1 channel.\n"
            "data.micro_batch='4': must be a whole number.\n"
            "data.words='all': must be one of full, names.",
        ),
        (
            lambda: GPTModule(GPTConfig(**SIZES), [1], seed_init="0", compile="maybe", z_loss=-1.0),
            "model.z_loss=-1.0: must be a finite number >= 0.\n"
            "model.schedule=[1]: must be `LRSchedule(peak, shape, unit, warmup, warmup_unit, horizon, floor, cooldown,"
            " on_conflict)`, or a mapping with some of these keys.\n"
            "model.seed_init='0': must be a whole number.\n"
            "model.compile='maybe': must be one of auto, on, whole, off.",
        ),
        (
            lambda: VLMModule(GPTConfig(**SIZES), LRSchedule(0.1, horizon=10), compile="whole"),
            "model.compile='whole': must be one of auto, on, off.",
        ),
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
