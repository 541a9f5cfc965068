"""Stability features by name."""

from __future__ import annotations

import re

import pytest
from jsonargparse import Namespace
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser

from lit_stable.callbacks import GradClip
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.cli.features import FEATURES, active_features, add_feature_arguments, refuse_twins

EXTRA = "{monitor: {class_path: lightning.pytorch.callbacks.LearningRateMonitor}}"


def parse(*words: str) -> dict[str, object]:
    parser = LightningArgumentParser(exit_on_error=False)
    add_feature_arguments(parser)
    return active_features(parser.instantiate(parser.parse_args(list(words))).stability)


def test_nothing_is_on_by_default():
    assert parse() == {}


def test_a_feature_is_turned_on_by_its_options_and_off_by_null():
    features = parse("--stability.grad_clip.max_norm", "0.5")
    assert isinstance(features["grad_clip"], GradClip)
    assert features["grad_clip"].max_norm == 0.5
    assert parse("--stability.grad_clip.max_norm", "0.5", "--stability.grad_clip", "null") == {}


def test_any_callback_has_a_free_name_under_extra_and_null_removes_it():
    assert list(parse("--stability.extra", EXTRA)) == ["extra.monitor"]
    assert parse("--stability.extra", EXTRA, "--stability.extra.monitor", "null") == {}


def test_active_features_leave_the_namespace_as_it_was():
    stability = Namespace(grad_clip=None, extra={"monitor": LearningRateMonitor()})
    active_features(stability)
    assert list(stability.extra) == ["monitor"]


def test_a_class_in_both_lists_is_refused():
    with pytest.raises(
        MisconfigurationException, match=r"GradClip: stands in trainer.callbacks and as stability.grad_clip, and would"
    ):
        refuse_twins([GradClip(1.0)], {"grad_clip": GradClip(2.0)})


def test_different_classes_are_no_twins():
    refuse_twins([LearningRateMonitor()], {"grad_clip": GradClip(2.0)})


def test_every_feature_is_named_after_its_class():
    for name, feature in FEATURES.items():
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", feature.__name__)
        assert name == words.lower()
