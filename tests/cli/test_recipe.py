from pathlib import Path

import pytest
from jsonargparse import ArgumentParser, get_loader

import lit_stable.recipes
from lit_stable.cli.recipe import expand, expand_arguments, resolve_recipe
from lit_stable.cli.recipe_file import RecipeError
from lit_stable.cli.shipped_recipes import shipped_recipes


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a recipe into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Two recipes in the place of the shipped ones."""
    package = tmp_path / "package"
    (package / "stability").mkdir(parents=True)
    (package / "small.yaml").write_text("trainer: {max_steps: 7}\n")
    (package / "stability" / "grad_clip.yaml").write_text("stability: {grad_clip: {max_norm: 1.0}}\n")
    monkeypatch.setattr(lit_stable.recipes, "__path__", [str(package)])
    return package


def test_the_recipes_of_the_package_are_found():
    root = Path(__file__).parents[2] / "recipes"
    expected = {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")}
    assert set(shipped_recipes()) == expected


@pytest.mark.parametrize("name", ["small", "small.yaml", "stability/grad_clip", "stability/grad_clip.yaml"])
def test_a_bare_name_finds_a_shipped_recipe(shipped, write, name):
    assert resolve_recipe(name) == shipped / (name.removesuffix(".yaml") + ".yaml")


def test_a_file_comes_before_a_shipped_recipe(shipped, write):
    path = write("small.yaml", "trainer: {max_steps: 1}")
    assert resolve_recipe("small.yaml") == path
    assert resolve_recipe("small") == shipped / "small.yaml"


def test_an_unknown_recipe_is_refused_with_the_nearest_names(shipped, write):
    write("smell.yaml", "")
    with pytest.raises(RecipeError, match=r"recipe 'smal': is neither a file nor a shipped recipe; nearest: small"):
        resolve_recipe("smal")
    with pytest.raises(RecipeError, match=r"'grad_clop': .*; nearest: stability/grad_clip\."):
        resolve_recipe("grad_clop")
    listed = r"'xyz': .*; there are small, stability/; `lit-stable recipes` lists all\."
    with pytest.raises(RecipeError, match=listed):
        resolve_recipe("xyz")


def test_a_layer_knows_its_lines_and_scalars_are_read_as_jsonargparse_reads_them(write):
    text = "a:\n  lr: 1e-4\n  day: 2024-01-31\nb: [1, {c: no}]\nd: '1e-4'\n"
    layer = expand(write("r.yaml", text))[0]
    assert (
        layer.data
        == get_loader("yaml")(text)
        == {
            "a": {"lr": 1e-4, "day": "2024-01-31"},
            "b": [1, {"c": False}],
            "d": "1e-4",
        }
    )
    assert layer.text == text
    assert [layer.line(p) for p in (["a"], ["a", "lr"], ["a", "day"], ["b", "1", "c"], ["d"])] == [1, 2, 3, 4, 5]


def test_a_key_that_an_alias_brings_has_the_line_of_the_alias(write):
    layer = expand(write("r.yaml", "x: &x {k: 1}\n\ny:\n  <<: *x\n"))[0]
    assert layer.data["y"] == {"k": 1}
    assert layer.line(["y", "k"]) == 3
    assert layer.line(["nowhere"]) == 1


def test_bases_come_first_depth_first_and_base_is_taken_out(shipped, write):
    write("grand.yaml", "g: 1")
    write("sub/parent.yaml", "base: ../grand.yaml\np: 1")
    path = write("child.yaml", "base: [sub/parent.yaml, small]\nc: 1")
    layers = expand(path)
    assert [layer.data for layer in layers] == [{"g": 1}, {"p": 1}, {"trainer": {"max_steps": 7}}, {"c": 1}]
    assert layers[-1].path == path


def test_a_shared_base_is_applied_once_at_its_first_place(write):
    write("root.yaml", "r: 1")
    write("a.yaml", "base: root.yaml\na: 1")
    write("b.yaml", "base: root.yaml\nb: 1")
    path = write("child.yaml", "base: [a.yaml, b.yaml]")
    assert [layer.data for layer in expand(path)] == [{"r": 1}, {"a": 1}, {"b": 1}, {}]


def test_an_empty_file_is_an_empty_layer(write):
    assert expand(write("r.yaml", "# nothing yet\n"))[0].data == {}


def test_a_recipe_that_inherits_from_itself_is_refused(write):
    write("a.yaml", "x: 1\nbase: b.yaml")
    write("b.yaml", "base: a.yaml")
    with pytest.raises(RecipeError, match=r"b.yaml:1: base: a.yaml inherits from this file; remove one of the two\."):
        expand(Path("a.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", r"r.yaml:4: b.c: stands on line 3 already; keep one\."),
        ("a: 1\nconfig: other.yaml\n", r"r.yaml:2: config: is for the command line; inherit with `base:`\."),
        ("a: 1\nbase: {b: 1}\n", r"r.yaml:2: base: must be the name of a recipe or a list of names, not \{'b': 1\}\."),
        ("a: 1\nbase: nowhere\n", r"r.yaml:2: base: recipe 'nowhere': is neither"),
        ("a: 1\nb: [1, 2\n", r"r.yaml:3: is not YAML: "),
        ("a: \x01\n", r"r.yaml: is not YAML: "),
        ("- a\n- b\n", r"r.yaml:1: must hold keys with values"),
    ],
)
def test_an_unreadable_recipe_is_refused_with_file_and_line(write, text, message):
    with pytest.raises(RecipeError, match=message):
        expand(write("r.yaml", text))


def test_a_file_in_another_encoding_is_refused(write):
    write("r.yaml", "").write_bytes("a: \u00e4".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"r.yaml: is not YAML: 'utf-8' codec"):
        expand(Path("r.yaml"))


def test_the_problems_of_all_files_come_in_one_message(write):
    write("a.yaml", "x: 1\nx: 2\nconfig: y\n")
    write("b.yaml", "base: a.yaml\n")
    write("c.yaml", "base: [a.yaml, nowhere]\n")
    with pytest.raises(RecipeError) as caught:
        expand_arguments(["--config", "b.yaml", "--config", "c.yaml", "-c", "lost"])
    places = [line.split(": ")[0] for line in dict.fromkeys(str(caught.value).splitlines())]
    assert places == ["a.yaml:2", "a.yaml:3", "c.yaml:1", "recipe 'lost'"]


def parse(argv):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--name", type=str)
    parser.add_argument("--a.x", type=int)
    parser.add_argument("--a.y", type=int)
    return parser.parse_args(argv)


@pytest.mark.parametrize("option", [["--config", "child.yaml"], ["-c", "child.yaml"], ["--config=child.yaml"]])
def test_expanded_arguments_merge_a_child_over_its_base_by_key(write, option):
    write("base.yaml", "lr: 1e-4\na: {x: 1, y: 1}\n")
    write("child.yaml", "base: base.yaml\na: {y: 2}\n")
    argv, layers, _ = expand_arguments(["--name", "n", *option])
    parsed = parse(argv)
    assert (parsed.name, parsed.lr, parsed.a.x, parsed.a.y) == ("n", 1e-4, 1, 2)
    assert [layer.path.name for layer in layers] == ["base.yaml", "child.yaml"]


def test_arguments_keep_their_order_around_a_recipe(write):
    write("r.yaml", "lr: 2.0")
    assert parse(expand_arguments(["--lr", "1", "--config", "r.yaml"])[0]).lr == 2.0
    assert parse(expand_arguments(["--config", "r.yaml", "--lr", "1"])[0]).lr == 1.0


def test_a_base_that_an_earlier_recipe_brought_in_does_not_undo_that_recipe(write):
    write("root.yaml", "lr: 1.0")
    write("a.yaml", "base: root.yaml\nlr: 2.0")
    write("b.yaml", "base: root.yaml\nname: b")
    argv, *_ = expand_arguments(["--config", "a.yaml", "--config", "b.yaml"])
    assert (parse(argv).lr, parse(argv).name) == (2.0, "b")


def test_a_recipe_named_twice_is_applied_twice(write):
    write("a.yaml", "lr: 2.0")
    write("b.yaml", "lr: 3.0")
    assert parse(expand_arguments(["-c", "a.yaml", "-c", "b.yaml", "-c", "a.yaml"])[0]).lr == 2.0


def test_text_that_looks_like_a_number_stays_text(write):
    write("r.yaml", "name: '1e-4'\n")
    assert parse(expand_arguments(["--config", "r.yaml"])[0]).name == "1e-4"


def test_a_recipe_longer_than_any_file_name_is_passed_on(write):
    write("r.yaml", "name: " + "x" * 20_000)
    assert parse(expand_arguments(["--config", "r.yaml"])[0]).name == "x" * 20_000


def test_a_config_option_without_value_is_left_to_the_parser():
    assert expand_arguments(["--config"]) == (["--config"], [], [])
