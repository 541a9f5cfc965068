from __future__ import annotations

from tiny_recipe import command

from lit_stable.cli.recipes import first_sentence
from lit_stable.cli.shipped_recipes import shipped_recipes


def test_every_recipe_is_listed_with_what_it_is():
    listed = dict(line.split(None, 1) for line in command("recipes").out.splitlines())
    assert listed.keys() == shipped_recipes().keys()
    assert listed["demo/rescue"] == first_sentence(shipped_recipes()["demo/rescue"])[: len(listed["demo/rescue"])]


def test_a_part_of_the_name_chooses():
    names = [line.split()[0] for line in command("recipes", "tr8b_curriculum").out.splitlines()]
    assert names == [f"tr8b_curriculum/exp{n}" for n in (1, 2, 3)]
    done = command("recipes", "nothing")
    assert (done.code, done.err) == (
        2,
        "lit-stable recipes: nothing: is part of no recipe's name; `lit-stable recipes` lists all.\n",
    )


def test_a_sentence_ends_where_a_sentence_ends(tmp_path):
    path = tmp_path / "r.yaml"
    for text, said in {
        "# V09: of 1.5 to\n# v1.0 (50B). And on.\na: 1\n": "V09: of 1.5 to v1.0 (50B)",
        "# The shape: all of it.\n": "The shape",
        "a: 1\n": "",
    }.items():
        path.write_text(text)
        assert first_sentence(path) == said
