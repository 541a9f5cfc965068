"""What GradClip refuses; see also the refusals in test_grad_clip.py."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tiny_fit import TinyModule, quiet_trainer

from lit_stable.callbacks import AdaGC, GradClip, ZClip
from lit_stable.callbacks.clip_arguments import refuse_flat_parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "block"}, r"`GradClip\(scope='block'\)`: must be one of global, .*, or a list"),
        ({"scope": []}, r"`GradClip\(scope=\[\]\)`: must be one of"),
        ({"adaptive": ZClip(), "ada_gc": AdaGC()}, r"`GradClip\(adaptive=..., ada_gc=...\)`: are two rules"),
        (
            {"adaptive": True},
            r"`GradClip\(adaptive=True\)`: must be `ZClip\(z_threshold, decay, warmup_steps\)`",
        ),
        (
            {"ada_gc": {"warmup": 2}},
            r"`GradClip\(ada_gc=\{'warmup': 2\}\)`: must be `AdaGC\(rel_threshold, ",
        ),
    ],
)
def test_arguments_that_break_a_rule_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        GradClip(**options)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(MisconfigurationException, match=r"(?s)max_norm=-1.*scope=\[\].*adaptive"):
        GradClip(-1.0, scope=[], adaptive=ZClip(), ada_gc=AdaGC())


def test_options_may_be_mappings_as_in_a_recipe() -> None:
    assert GradClip(adaptive={"warmup_steps": 2}).adaptive == ZClip(warmup_steps=2)  # type: ignore[arg-type]
    assert GradClip(ada_gc={}).ada_gc == AdaGC(1.05, 0.98, 100, 1.0)  # type: ignore[arg-type]
    assert ZClip() == ZClip(2.5, 0.97, 25)


def test_ada_gc_is_by_tensor_and_without_a_cap_unless_told_otherwise() -> None:
    assert (GradClip(ada_gc=AdaGC()).scope, GradClip(ada_gc=AdaGC()).max_norm) == ("tensor", None)
    assert (GradClip(0.5, scope="layer", ada_gc=AdaGC()).scope, GradClip().scope) == ("layer", "global")


@pytest.mark.parametrize("scope", ["layer", "tensor", ["net"]])
def test_flat_parameters_have_no_parts(scope: Any) -> None:
    clip = GradClip(scope=scope)
    trainer: Any = quiet_trainer(clip)
    trainer.strategy.kwargs = {"use_orig_params": False}
    with pytest.raises(
        MisconfigurationException, match=r"`FSDPStrategy\(use_orig_params=False\)`: .* set use_orig_params=True"
    ):
        clip.setup(trainer, TinyModule(), "fit")
    for possible in ("global", "group"):
        refuse_flat_parameters(trainer, possible)
