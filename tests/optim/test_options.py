from __future__ import annotations

import pytest

from lit_stable.optim.options import ADAMW, OptimizerOptions, PatternOptions


def test_the_default_is_adamw_with_coupled_decay():
    assert OptimizerOptions() == ADAMW
    assert (ADAMW.name, ADAMW.decay, ADAMW.weight_decay, ADAMW.decay_norms) == ("adamw", "coupled", 0.1, False)


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 2), ({"name": "adam"}, 2), ({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1)],
)
def test_moments_per_parameter(options, count):
    assert OptimizerOptions(**options).moments == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 1.0)}, r"optimizer.betas=\(0.9, 1.0\): each must lie in \[0, 1\)\."),
        ({"eps": 0.0}, r"optimizer.eps=0.0: must be > 0\."),
        ({"weight_decay": -1.0}, r"optimizer.weight_decay=-1.0: must be a finite number >= 0\."),
        ({"weight_decay": float("inf")}, r"optimizer.weight_decay=inf: must be a finite number >= 0\."),
        ({"weight_decay": float("nan")}, r"optimizer.weight_decay=nan: must be a finite number >= 0\."),
        ({"name": "lion"}, r"optimizer.name='lion': must be one of adamw, adam, sgd\."),
        ({"decay": "decoupled"}, r"optimizer.decay='decoupled': must be one of coupled, independent\."),
        ({"name": "sgd", "momentum": 1.0}, r"optimizer.momentum=1.0: must lie in \[0, 1\)\."),
        ({"momentum": 0.9}, r"optimizer.momentum=0.9: belongs to sgd; adamw averages gradients by betas\[0\], set it"),
        (
            {"name": "adam", "decay": "independent"},
            "decay=independent: adam adds decay to the gradient, .* take adamw.",
        ),
        ({"name": "sgd", "decay": "independent"}, "decay=independent: sgd adds decay to the gradient, .* take adamw."),
        ({"patterns": {"wte.*": PatternOptions()}}, r"optimizer.patterns.wte.\*: changes nothing; give lr_factor or"),
        ({"patterns": {"a": PatternOptions(lr_factor=0.0)}}, r"patterns.a.lr_factor=0.0: must be a finite number > 0;"),
        (
            {"patterns": {"a": PatternOptions(weight_decay=-1.0)}},
            r"patterns.a.weight_decay=-1.0: must be a finite",
        ),
    ],
)
def test_refusals_name_value_and_rule(options, message):
    with pytest.raises(ValueError, match=message) as error:
        OptimizerOptions(**options)
    assert len(str(error.value).splitlines()) == 1


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError, match=r"eps=-1.0: .*\noptimizer.weight_decay=-1.0"):
        OptimizerOptions(eps=-1.0, weight_decay=-1.0)
