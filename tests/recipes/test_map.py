"""The map of recipes/README.md: every row of the documents once, and nothing in it that does not exist."""

from __future__ import annotations

import inspect
import re

import pytest
from recipe_values import MISSING, resolved, value
from row_values import ROW_VALUES
from tiny_recipe import REPOSITORY

from lit_stable.cli.features import FEATURES

SYSTEMS = {"B": 34, "O": 38, "C": 7, "N": 16, "E": 19, "L": 14, "V": 21}
LINES = re.findall(r"^\| ([A-Z]\d\d) \| (.+) \| (.+) \|$", (REPOSITORY / "recipes" / "README.md").read_text(), re.M)
WHERE = {row: where for row, where, _ in LINES}
GROUPS = ("model", "data", "trainer", "mesh", "loss_scale", "stability", "checkpoints", "published")


def recipes_in(text: str) -> set[str]:
    return {name for name in re.findall(r"`([^`]+)`", text) if name in ROW_VALUES}


def test_every_row_is_on_the_map_once_and_in_order():
    assert [row for row, *_ in LINES] == [
        f"{letter}{n:02}" for letter, last in SYSTEMS.items() for n in range(1, last + 1)
    ]


def test_every_name_with_a_slash_is_a_recipe():
    named = set(re.findall(r"`((?:bloomberggpt|opt|tr8\w*|bloom|hf_vlm|sizes)/[\w.]+)`", " ".join(WHERE.values())))
    assert named == set(ROW_VALUES)


@pytest.mark.parametrize("row", WHERE)
def test_a_recipe_that_the_map_names_is_compared_with_that_row(row):
    inherited = {
        "C01",
        "C04",
        "C07",
        "E10",
        "L04",
        "L07",
        "L08",
        "L09",
        "L10",
        "L12",
        "L14",
        "N07",
        "N16",
        "O21",
        "O32",
        "V16",
    }
    if row not in inherited:
        assert {name for name in recipes_in(WHERE[row]) if row not in ROW_VALUES[name]} == set()


@pytest.mark.parametrize("row", WHERE)
def test_an_option_that_the_map_names_exists(row):
    recipe, sees = resolved("bloomberggpt/v2.0"), resolved("hf_vlm/captions")
    for key in re.findall(rf"`((?:{'|'.join(GROUPS)})\.[\w.]+)", WHERE[row]):
        group, name, *rest = key.split(".")
        if group == "stability":
            assert name in FEATURES
            assert set(rest) <= inspect.signature(FEATURES[name]).parameters.keys()
        elif name != "sources":
            assert value(recipe, key) != MISSING or (row[0] == "V" and value(sees, key) != MISSING), key
