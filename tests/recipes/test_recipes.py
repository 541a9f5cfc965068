"""Shipped recipes, resolved by the real command, those of the documents' runs in test_systems; what the quickstart
promises, pinned."""

from __future__ import annotations

import re

import pytest
import yaml
from contract_entries import ACTING
from row_values import ROW_VALUES
from tiny_recipe import command

from lit_stable.cli.features import FEATURES
from lit_stable.cli.shipped_recipes import shipped_recipes

ALL = shipped_recipes()
RECIPES = {name: path for name, path in ALL.items() if name not in ROW_VALUES or name == "sizes/tiny"}
if "SkipAwareEMA" not in ACTING:  # Lightning has WeightAveraging from 2.6 on
    del RECIPES["stability/skip_aware_ema"]
SIZES = ["quickstart", "gpt2_124m", "gpt_1b3"]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """What `check` says about each recipe, the quickstart on one device and the others on 8."""
    pages = {}
    for name in RECIPES:
        # Those in folders are fragments of a recipe: they are laid over a whole one.
        under = ["--config", "quickstart"] if "/" in name else []
        done = command("check", *under, "--config", name, "--devices", "1" if under or name == "quickstart" else "8")
        pages[name] = done.out if done.code == 0 else done.err
    return pages


def test_the_three_sizes_are_shipped():
    assert set(SIZES) <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resolves_without_problems(pages, name):
    assert re.search(r"^parameters: [\d,]+ \(", pages[name], re.MULTILINE), pages[name]
    assert re.search(r"^run: [\d,]+ steps, [\d,]+ tokens, ", pages[name], re.MULTILINE)


FRAGMENTS = {
    name.removeprefix("stability/"): yaml.safe_load(path.read_text())["stability"]
    for name, path in ALL.items()
    if name.startswith("stability/")
}


def test_a_fragment_turns_on_every_feature():
    assert {feature for fragment in FRAGMENTS.values() for feature in fragment} >= FEATURES.keys()


@pytest.mark.parametrize("callback", ACTING)
def test_what_acts_on_a_run_has_a_fragment_that_turns_it_on(pages, callback):
    name = {cls.__name__: name for name, cls in FEATURES.items()}.get(callback, "skip_aware_ema")
    fragment = FRAGMENTS[name]
    assert name in fragment or fragment["extra"][name]["class_path"].endswith(f".{callback}")
    (features,) = re.findall(r"^features: .*", pages[f"stability/{name}"], re.MULTILINE)
    assert f" {callback}(" in features


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_says_at_the_top_what_it_is_for(name):
    assert ALL[name].read_text().startswith("# ")


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_names_no_folder_of_this_machine(name):
    def strings(node):
        if isinstance(node, dict):
            return [text for value in node.values() for text in strings(value)]
        return [node] if isinstance(node, str) else []

    assert not [text for text in strings(yaml.safe_load(ALL[name].read_text())) if text.startswith(("/", "~"))]


def test_the_quickstart_is_what_the_readme_says(pages):
    page = pages["quickstart"]
    # 2048 x 192 and 256 x 192 embeddings, 4 blocks of 12 x 192^2, 9 norms of 192; the head is tied.
    parameters = (2048 + 256) * 192 + 4 * 12 * 192**2 + 9 * 192
    assert f"parameters: {parameters:,} (" in page
    assert "step: 16 samples x 256 = 4,096 tokens, as 2 micro-batches of 8 on each of 1 data-parallel ranks" in page
    assert f"run: 300 steps, {300 * 4096:,} tokens" in page
    milestones = page.split("learning rate (cosine) by steps:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[:2] for line in milestones] == [
        ["0", "0"],
        ["30", "0.003"],
        ["165", "0.00165"],
        ["300", "0.0003"],
    ]
    assert "features: GradClip(max_norm=1.0" in page


def test_the_named_sizes_have_their_parameters(pages):
    found = {name: number(r"^parameters: ([\d,]+)", pages[name]) for name in SIZES}
    # GPT-2 small has 124,439,808 with its 50,257 tokens and biases; here 47 more tokens of 768 and no biases.
    biases = 12 * (3 + 1 + 4 + 1 + 2) * 768 + 768
    assert found["gpt2_124m"] == 124_439_808 + 47 * 768 - biases
    assert found["gpt_1b3"] == (50304 + 2048) * 2048 + 24 * 12 * 2048**2 + 49 * 2048


def test_the_bigger_recipes_train_on_the_tokens_they_name(pages):
    for name, tokens in (("gpt2_124m", 10e9), ("gpt_1b3", 26e9)):
        total = number(r"steps, ([\d,]+) tokens", pages[name])
        assert abs(total - tokens) / tokens < 0.01


def number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text, re.MULTILINE)[1].replace(",", ""))
