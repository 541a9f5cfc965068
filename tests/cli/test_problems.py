from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from lit_stable.cli.problems import argument_problems, recipe_problems
from lit_stable.cli.recipe import expand, expand_arguments


@dataclass(frozen=True)
class Source:
    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class Sizes:
    d_model: int
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"


class Clip(Callback):
    def __init__(self, max_norm: float, norm_type: float = 2.0):
        pass


class Skip(Callback):
    def __init__(self, threshold: float = 1.0, window: int = 128):
        pass


Stage = TypedDict("Stage", {"from": int, "norm": float})


class Stages(Callback):
    def __init__(self, stages: list[Stage] | None = None):
        pass


class Model:
    def __init__(self, gpt: Sizes, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95)):
        pass


class Data:
    def __init__(self, sources: dict[str, Source], names: list[str] | None = None):
        pass


@pytest.fixture
def parser():
    parser = LightningArgumentParser()
    parser.add_argument("-c", "--config", action="config")
    parser.add_class_arguments(Trainer, "trainer")
    parser.add_class_arguments(Model, "model")
    parser.add_class_arguments(Data, "data")
    parser.add_argument("--stability.grad_clip", type=Clip | None, default=None)
    parser.add_argument("--stability.grad_spike_skip", type=Skip | None, default=None)
    parser.add_argument("--stability.extra", type=dict[str, Callback | None], default={})
    parser.add_argument("--ckpt_path", type=str | None, default=None)
    return parser


@pytest.fixture
def problems(tmp_path, monkeypatch, parser):
    """Problems of recipe texts, each one file ``<n>.yaml``, applied in order."""
    monkeypatch.chdir(tmp_path)

    def problems(*texts):
        layers = []
        for number, text in enumerate(texts, start=1):
            path = Path(f"{number}.yaml")
            path.write_text(text.replace("HERE", __name__))
            layers += expand(path)
        return recipe_problems(layers, parser)

    return problems


GOOD = """\
trainer:
  max_steps: 10
  precision: bf16-mixed
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
model:
  gpt: {d_model: 64}
  lr: 1e-4
data:
  sources:
    web: {path: a, weight: 2}
stability:
  grad_clip: {max_norm: 1}
  grad_spike_skip: null
  extra:
    second: {class_path: HERE.Skip, init_args: {window: 3}}
"""


def test_a_good_recipe_has_no_problem(problems):
    assert problems(GOOD) == []


def test_a_layer_need_not_be_complete(problems):
    assert problems("model: {lr: 1}\nstability: {grad_clip: {norm_type: 1}}\ndata: {sources: {web: {weight: 2}}}") == []


def test_all_problems_are_reported_each_with_its_line(problems):
    text = """\
trainer:
  max_stepz: 3
  max_epochs: two
model:
  gpt:
    d_modl: 3
    norm: rms
  lrr: 3
stability:
  grad_spikeskip: {threshold: 5, window: 3}
  grad_clip: {max_norm: big, normtype: 3}
stabilty: {}
"""
    assert problems(text) == [
        "1.yaml:2: trainer.max_stepz: is no option; nearest is trainer.max_steps.",
        "1.yaml:3: trainer.max_epochs: must be an int or null, not 'two'.",
        "1.yaml:6: model.gpt.d_modl: is no option; nearest is model.gpt.d_model.",
        "1.yaml:7: model.gpt.norm: must be one of layernorm, rmsnorm, not 'rms'.",
        "1.yaml:8: model.lrr: is no option; nearest is model.lr.",
        "1.yaml:10: stability.grad_spikeskip: is no option; nearest is stability.grad_spike_skip.",
        "1.yaml:11: stability.grad_clip.max_norm: must be a float, not 'big'.",
        "1.yaml:11: stability.grad_clip.normtype: is no option; nearest is norm_type.",
        "1.yaml:12: stabilty: is no option; nearest is stability.",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_steps: 3", "max_steps: is no option; nearest is trainer.max_steps."),
        ("qqq: 3", "qqq: is no option; there are ckpt_path, data, model, stability, trainer."),
        ("model: {qqq: 3}", "model.qqq: is no option; there are betas, gpt, lr."),
        ("trainer: {qqq: 3}", "trainer.qqq: is no option."),
        ("trainer: {devices: {a: 1}}", "trainer.devices: must be a list or text or an int, not {'a': 1}."),
        ("trainer: 5", "trainer: must hold options below it, not 5; write some or remove the key."),
        ("a: 1\ntrainer:", "trainer: must hold options below it, not None; write some or remove the key."),
        ("model: {gpt: big}", "model.gpt: must hold options below it, not 'big'; write some or remove the key."),
        ("model: {betas: [0.9]}", "model.betas: must be a tuple with 2 elements, not [0.9]."),
        ("model: {betas: [0.9, x]}", "model.betas: must be a float, not x."),
        ("stability: {grad_clip: 5}", "stability.grad_clip: must be a Clip or null, not 5."),
        ("data: {names: web}", "data.names: must be a list or null, not 'web'."),
        ("data: {sources: {web: {pth: a}}}", "data.sources.web.pth: is no option; nearest is path."),
        ("data: {sources: {web: {qq: a}}}", "data.sources.web.qq: is no option; there are path, weight."),
        ("data: {sources: {web: {weight: z}}}", "data.sources.web.weight: must be a float, not 'z'."),
        (
            "trainer: {callbacks: [{class_path: HERE.Skip, init_args: {window: x}}]}",
            "trainer.callbacks: window must be an int, not x.",
        ),
        (
            "trainer: {callbacks: [{class_path: HERE.Skip, init_args: {windw: 1}}]}",
            "trainer.callbacks: windw is no option here; nearest is window.",
        ),
    ],
)
def test_a_wrong_leaf_is_named_with_the_rule(problems, text, expected):
    found = problems(text)
    assert found[-1].split(": ", 1)[1] == expected


def test_a_class_is_judged_by_class_path_and_each_of_its_arguments(problems):
    text = "stability: {extra: {a: {class_path: HERE.Skip, init_args: {windw: 1, threshold: x}}}}"
    assert problems(text) == [
        "1.yaml:1: stability.extra.a.init_args.windw: is no option; nearest is window.",
        "1.yaml:1: stability.extra.a.init_args.threshold: must be a float, not 'x'.",
    ]


def test_an_unknown_class_is_one_problem_whatever_stands_below_it(problems):
    text = "stability: {extra: {a: {init_args: {x: 1, y: 1}, class_path: HERE.Nope}}}"
    (line,) = problems(text)
    assert line.startswith("1.yaml:1: stability.extra.a.class_path: module")
    assert line.endswith("has no attribute 'Nope'.")


def test_a_class_of_another_kind_is_refused(problems):
    (line,) = problems("stability: {grad_clip: {class_path: HERE.Skip}}")
    assert line.endswith("Skip does not correspond to a subclass of Clip.")


def test_arguments_beside_class_path_are_refused(problems):
    (line,) = problems("stability: {grad_clip: {class_path: HERE.Clip, max_norm: 3}}")
    assert line.endswith("max_norm: stands beside class_path; arguments of the class stand under init_args.")


def test_a_later_layer_may_change_an_argument_of_a_class_named_before(problems):
    first = "stability: {extra: {a: {class_path: HERE.Skip, init_args: {window: 1}}}}"
    assert problems(first, "stability: {extra: {a: {init_args: {window: 2}}}}") == []
    assert problems(first, "stability: {extra: {a: {window: 2}}}") == []
    (line,) = problems(first, "stability: {extra: {a: {init_args: {window: x}}}}")
    assert line == "2.yaml:1: stability.extra.a.init_args.window: must be an int, not 'x'."


def test_the_layers_are_left_as_they_were(tmp_path, parser):
    text = "trainer: {callbacks: [{class_path: HERE.Skip, init_args: {window: 1}}]}\nmodel: {betas: [0.9, 0.95]}\n"
    path = tmp_path / "r.yaml"
    path.write_text(text.replace("HERE", __name__))
    layers = expand(path)
    assert recipe_problems(layers, parser) == []
    assert layers == expand(path)


def test_the_parser_still_exits_on_errors_afterwards(problems, parser):
    problems("model: {lr: x}")
    assert parser.exit_on_error


@pytest.fixture
def complain(tmp_path, monkeypatch, parser):
    """Problems of arguments behind a good recipe."""
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(GOOD.replace("HERE", __name__))

    def complain(*argv):
        return argument_problems(expand_arguments(["--config", "good.yaml", *argv])[0], parser)

    return complain


def test_good_arguments_have_no_problem(complain):
    assert (
        complain("--model.lr", "3", "--stability.extra.second.init_args.window=4", "--stability.grad_clip=null") == []
    )


def test_all_problems_of_the_command_line_are_reported(complain):
    assert complain("--model.lrr", "3", "--trainer.max_stepz=3", "--model.gpt.d_model", "wide", "--max_steps", "3") == [
        "--model.lrr: is no option; nearest is --model.lr.",
        "--trainer.max_stepz: is no option; nearest is --trainer.max_steps.",
        "--model.gpt.d_model: must be an int, not 'wide'.",
        "--max_steps: is no option; nearest is --trainer.max_steps.",
    ]


def test_an_argument_of_a_class_that_the_recipe_names_is_no_problem_beside_a_wrong_one(complain):
    argv = ("--stability.extra.second.init_args.window", "4", "--stability.grad_clip.maxnorm", "3")
    assert complain(*argv) == ["--stability.grad_clip.maxnorm: is no option; nearest is max_norm."]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["extra-h"], "extra-h: is no option; options start with --, as in --trainer.max_steps 100."),
        (["--model.lr"], "--model.lr: expected one argument."),
        (["--model.lr=x"], "--model.lr: must be a float, not 'x'."),
        (["--qqq", "1"], "--qqq: is no option; there are ckpt_path, data, model, stability, trainer."),
    ],
)
def test_a_malformed_argument_is_named(parser, argv, expected):
    assert argument_problems(["--model.gpt.d_model=8", "--data.sources={}", *argv], parser) == [expected]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model.gpt", "[1]"], ["--model.gpt: must hold options below it, not [1]; write some or remove the key."]),
        (
            ["--model.gpt={d_model: x, nrm: 1}"],
            [
                "--model.gpt.d_model: must be an int, not 'x'.",
                "--model.gpt.nrm: is no option; nearest is model.gpt.norm.",
            ],
        ),
        (
            ["--stability.grad_spike_skip", "{threshold: x, windw: 1}"],
            [
                "--stability.grad_spike_skip.threshold: must be a float, not 'x'.",
                "--stability.grad_spike_skip.windw: is no option; nearest is window.",
            ],
        ),
        (["--model.lr", "{"], ["--model.lr: must be a float, not '{'."]),
    ],
)
def test_a_mapping_on_the_command_line_is_judged_leaf_by_leaf(complain, argv, expected):
    assert complain(*argv) == expected


def test_a_wrong_key_that_holds_others_is_one_problem_on_the_command_line_too(complain, problems):
    assert complain("--stability.grad_clip.max_nrm.x", "3") == [
        "--stability.grad_clip.max_nrm.x: max_nrm is no option here; nearest is max_norm."
    ]
    assert problems("stability: {grad_clip: {max_nrm: {x: 1, y: 2}}}") == [
        "1.yaml:1: stability.grad_clip.max_nrm: is no option; nearest is max_norm."
    ]


def test_an_entry_of_a_list_that_lacks_a_key_or_has_another_is_named(problems):
    text = "stability:\n  extra:\n    a: {class_path: HERE.Stages, init_args: {stages: [%s]}}"
    place = "1.yaml:3: stability.extra.a.init_args.stages"
    assert problems(text % "{form: 3, norm: 1.0}") == [
        f"{place}: the entry {{'form': 3, 'norm': 1.0}} lacks the key 'from'."
    ]
    assert problems(text % "{from: 3, norm: 1.0, x: 1}") == [
        f"{place}: the entry {{'from': 3, 'norm': 1.0, 'x': 1}} has an unknown key 'x'."
    ]


def test_what_is_missing_is_reported_after_what_is_wrong(parser):
    assert argument_problems(["--model.lr", "1", "--model.lrr", "1"], parser) == [
        "--model.lrr: is no option; nearest is --model.lr.",
        "model.gpt.d_model, data.sources: missing; set in a recipe or on the command line.",
    ]


def test_a_required_argument_of_a_feature_is_named_in_full(complain):
    argv = ["--stability.grad_clip", "null", "--stability.grad_clip.norm_type", "1"]
    assert complain(*argv) == ["stability.grad_clip.max_norm: missing; set in a recipe or on the command line."]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--print_config"], ["--trainer.logger.help", "CSVLogger"]])
def test_a_call_for_help_is_left_to_the_parser(parser, argv):
    assert argument_problems(["--qqq", "1", *argv], parser) == []
