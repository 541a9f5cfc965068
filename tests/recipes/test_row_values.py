"""The recipes against the documents, number by number: none may differ, and none may be changed unseen."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from own_values import OURS
from recipe_values import as_written, leaves, own_layer, resolved, same, value, written
from row_values import CONTINUES, ROW_VALUES, RowValues

from lit_stable.cli.recipe import resolve_recipe
from lit_stable.cli.shipped_recipes import shipped_recipes

FOLDERS = (
    "bloomberggpt",
    "opt",
    "tr8",
    "tr8b_curriculum",
    "tr8b_bitsandbytes",
    "tr8b_embed_norm",
    "bloom",
    "hf_vlm",
    "sizes",
)
#: Fragments, and the whole recipe that they are laid over here.
UNDER = {name: ["gpt_1b3"] for name in ROW_VALUES if name.startswith("sizes/") and name != "sizes/llama_8b"}
UNDER |= {name: ["hf_vlm/captions"] for name in ("hf_vlm/language_shape", "hf_vlm/pairs")}


def expected(rows: RowValues) -> Iterator[tuple[str, str, Any]]:
    return ((row, key, wanted) for row, values in rows.items() for key, wanted in values.items())


def differences(name: str, recipe: dict[str, Any], explicit_only: bool = False) -> list[str]:
    """What a recipe has otherwise than the documents."""
    found = []
    for row, key, wanted in expected(ROW_VALUES[name]):
        here = value(recipe, key)
        if not same(here, wanted) and not (here == "missing" and (explicit_only or key.startswith("scale."))):
            found.append(f"{row}: {key} is {here}, not {wanted}")
    return found


def test_every_recipe_is_in_a_table():
    assert {name for name in shipped_recipes() if name.split("/")[0] in FOLDERS} == set(ROW_VALUES)
    assert set(shipped_recipes()) == {*ROW_VALUES, *OURS}


@pytest.mark.parametrize("name", ROW_VALUES)
def test_a_resolved_recipe_has_the_values_of_its_rows(name):
    assert differences(name, resolved(*UNDER.get(name, []), name)) == []


@pytest.mark.parametrize("name", ROW_VALUES)
def test_every_leaf_of_a_recipe_is_named_by_a_row_of_it(name):
    named = {key for _, key, _ in expected(ROW_VALUES[name])}
    assert [".".join(path) for path, _ in leaves(as_written(own_layer(name))) if ".".join(path) not in named] == []


@pytest.mark.parametrize("name", ROW_VALUES)
def test_no_number_of_a_recipe_can_be_changed_unseen(name):
    assert differences(name, written(name), explicit_only=True) == []
    own = as_written(own_layer(name))
    unseen = []
    for path, leaf in leaves(own):
        for changed in mutations(leaf):
            mutant = copy.deepcopy(own)
            below = mutant
            for part in path[:-1]:
                below = below[part]
            below[path[-1]] = changed
            if not differences(name, written(name, mutant), explicit_only=True):
                unseen.append(f"{'.'.join(path)}: {leaf} -> {changed}")
    assert unseen == []


def mutations(leaf: Any) -> Iterator[Any]:
    """The leaf with each of its numbers changed, one at a time."""
    if isinstance(leaf, bool):
        yield not leaf
    elif isinstance(leaf, (int, float)):
        yield leaf * 1.01 + (leaf == 0) if isinstance(leaf, float) else leaf + 1
    elif isinstance(leaf, str):
        for number in re.finditer(r"\d", leaf):
            yield leaf[: number.start()] + str((int(number[0]) + 1) % 10) + leaf[number.end() :]
    elif isinstance(leaf, list):
        for index, item in enumerate(leaf):
            yield from ([*leaf[:index], other, *leaf[index + 1 :]] for other in mutations(item))
    elif isinstance(leaf, dict):
        for key, item in leaf.items():
            rest = {other: leaf[other] for other in leaf if other != key}
            yield from ({**rest, key: other} for other in mutations(item))
            yield from ({**rest, other: item} for other in mutations(key))


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_of_ours_says_what_it_said(name):
    assert {".".join(path): leaf for path, leaf in leaves(as_written(own_layer(name)))} == OURS[name]


@pytest.mark.parametrize("name", ROW_VALUES)
def test_a_header_says_from_which_checkpoint_a_run_goes_on(name):
    header = re.findall(r"--config (\S+) --ckpt_path (\S+@\d+)", resolve_recipe(name).read_text())
    assert header == ([(name, CONTINUES[name][1])] if name in CONTINUES else [])


@pytest.mark.parametrize("name", CONTINUES)
def test_the_checkpoint_that_a_run_goes_on_from_is_written_and_kept(name):
    parent, step = CONTINUES[name][1].split("@")
    folder = name.split("/")[0]
    saves = resolved(f"{folder}/{parent.removeprefix(f'{folder}-')}")["checkpoints"]
    assert int(step) % saves["every_steps"] == 0 or int(step) == saves["first_step"]
    assert saves["keep_last"] == 1000
