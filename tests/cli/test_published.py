"""The shape of a model against what is published of it: tr8-104B's mis-shaped 57B, and its repair."""

from __future__ import annotations

import pytest
from tiny_recipe import command, write_recipe

from lit_stable.cli.published import Published
from lit_stable.model.config import GPTConfig

FIXED = GPTConfig(vocab_size=50_304, n_layer=64, n_head=80, d_model=11_600, max_length=2048, bias=True)
MISSHAPED = GPTConfig(vocab_size=50_304, n_layer=32, n_head=32, d_model=16_384, d_ff=20_480, max_length=2048, bias=True)


def test_104b_has_its_parameters_within_a_tenth_of_a_percent():
    published = Published("103.96B", 4)
    assert published.problems(FIXED) == []
    assert abs(published.deviation(FIXED)) < 1e-3
    assert published.line(FIXED) == f"published: 103.96B parameters, the model {published.deviation(FIXED):+.4%}"


def test_the_57b_that_was_meant_to_be_104b_is_found_by_both():
    assert Published("104B", 4).problems(MISSHAPED) == [
        "published.parameters=104B: the model has 56.7B, -45.483%; correct model.gpt, or set it to null. Allowed is"
        " 0.1%.",
        "published.d_ff_ratio=4: model.gpt.d_ff=20480 is 1.25 x d_model=16384; it must be 65536.",
    ]


def test_nothing_is_asked_unless_the_recipe_asks():
    assert Published().problems(MISSHAPED) == []
    assert Published().line(MISSHAPED) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameters": "many"}, r"published.parameters: 'many': must be a whole number"),
        ({"parameters": 0}, r"published.parameters=0: must be at least 1\."),
        ({"d_ff_ratio": 0.0}, r"published.d_ff_ratio=0.0: must be > 0\."),
    ],
)
def test_what_cannot_be_published_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Published(**arguments)


def test_a_recipe_that_builds_another_shape_is_refused_before_it_trains(tmp_path):
    recipe = write_recipe(tmp_path, published={"parameters": 7750, "d_ff_ratio": 4}, model__gpt__d_ff=20)
    done = command("fit", "--config", recipe)
    assert done.code == 2
    assert "published.parameters=7750: the model has 6.34k, -18.245%" in done.err
    assert "published.d_ff_ratio=4: model.gpt.d_ff=20 is 1.25 x d_model=16; it must be 64." in done.err
    assert not (tmp_path / "runs").exists()
    page = command("check", "--config", recipe, "--model.gpt.d_ff", "null").out
    assert "published: 7750 parameters, the model -0.0774%" in page
