"""What every callback of the package promises, one by one."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from contract_entries import CLASSES, ENTRIES, groups, make
from contract_fits import RareRuns, Runs, own
from contract_project import Host, fit
from contract_promises import PROMISES, QUICK
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import TinyData, TinyModule, quiet_trainer

import lit_stable.callbacks as package
from lit_stable.callbacks import Progress
from lit_stable.callbacks.base import MisconfigurationException, StabilityCallback

HOST = Host()
#: Not imported with the package: Lightning has its base from 2.6 on.
ON_THEIR_OWN = {"SkipAwareEMA"}

pytestmark = pytest.mark.filterwarnings("ignore:GradSpikeSkip")
every_callback = pytest.mark.parametrize("name", ENTRIES)


def test_every_callback_that_the_package_defines_has_an_entry_and_a_public_name() -> None:
    assert CLASSES.keys() == ENTRIES.keys()
    classes = {name for name in package.__all__ if inspect.isclass(getattr(package, name))}
    public = {name for name in classes if issubclass(getattr(package, name), Callback)}
    assert public == ENTRIES.keys() - ON_THEIR_OWN
    assert list(ENTRIES) == sorted(ENTRIES)


@pytest.fixture(scope="module", autouse=True)
def little_to_walk() -> None:
    """For `GarbageCollection`: fits through the command line bring back what conftest.py has put away."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All fits of one callback, made once."""
    return functools.cache(lambda name: Runs((name,), HOST, tmp_path_factory.mktemp(name)))


@every_callback
@pytest.mark.parametrize("promise", PROMISES)
def test_it_keeps(promise: str, name: str, runs: Any) -> None:
    PROMISES[promise](runs(name))


GROUPS = groups("auto")


@pytest.fixture(scope="module")
def rare_runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Fits with rare save points: of each callback that acts by itself, of those that watch together."""
    return functools.cache(lambda group: RareRuns(GROUPS[group], HOST, tmp_path_factory.mktemp(group)))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("promise", QUICK)
def test_it_keeps_saved_where_saves_are_rare(promise: str, group: str, rare_runs: Any) -> None:
    QUICK[promise](rare_runs(group))


KEY = r"``((?:stability|progress)/\w+)(?:/[A-Z.]+)?``"  # in a manual: one name, or one for each NAME


# -- its manual ------------------------------------------------------------------------------------------------------


@every_callback
def test_its_docstring_is_a_manual(name: str) -> None:
    cls = CLASSES[name]
    assert issubclass(cls, StabilityCallback) or name in ON_THEIR_OWN
    manual = inspect.getdoc(cls) or ""
    assert "Example::" in manual
    assert "ogged" in manual, "says which metrics it logs, or that it logs none"
    for argument in inspect.signature(cls).parameters:
        assert f"\n    {argument}: " in manual, f"argument {argument} is not explained"


@every_callback
def test_built_from_yaml_it_logs_what_its_docstring_says_and_nothing_else(name: str, tmp_path: Path) -> None:
    options = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "poison": {}, "width": ENTRIES[name].width}
    parser, parsed = from_yaml(name)
    built = parser.instantiate(parsed).callback
    trainer: Any = fit(HOST, built, *(c for c in own((name,)) if type(c) is not CLASSES[name]), steps=2, **options)
    assert trainer.global_step == 2
    assert built in trainer.callbacks
    # With those of the callbacks that this one installs or needs.
    kinds = [type(c) for c in trainer.callbacks if type(c).__name__ in CLASSES]
    later = {key for kind in kinds for key in ENTRIES[kind.__name__].later}
    manuals = [inspect.getdoc(kind) or "" for kind in kinds]
    documented = {key for manual in manuals for key in re.findall(KEY, manual)}
    logged = {"/".join(key.split("/")[:2]) for key in trainer.logged_metrics}
    assert logged == documented - later


#: Keys in the manuals of several callbacks: which of them logs it, and why the others speak of it.
SHARED = {
    "progress/counted_tokens": "AccumulationWindows, and BatchSizeWarmup, which stands in its place",
    "progress/micro_batches": "the same",
    "stability/grad_norm": "GradNorm; GradClip installs it",
    "stability/lr": "EffectiveLR; LROverride installs it",
    "stability/lr_factor": "the same",
}


def test_no_key_has_two_meanings() -> None:
    owners: dict[str, set[str]] = {}
    for name, cls in CLASSES.items():
        for key in re.findall(KEY, inspect.getdoc(cls) or ""):
            owners.setdefault(key, set()).add(name)
    assert {key for key, names in owners.items() if len(names) > 1} == set(SHARED)


WORDS = [
    (name, argument)
    for name, cls in CLASSES.items()
    if cls.__init__ is not object.__init__
    for argument, hint in get_type_hints(cls.__init__).items()
    if "Literal" in str(hint)
]


@pytest.mark.parametrize(("name", "argument"), WORDS)
def test_a_misspelt_word_is_refused_where_it_is_given(name: str, argument: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`{name}\({argument}='wtach'\)`: must be one of \w+, \w+"):
        make(name, {**ENTRIES[name].acts, argument: "wtach"})


# -- from YAML -------------------------------------------------------------------------------------------------------


@every_callback
def test_its_constructor_hides_no_key_and_its_defaults_can_be_written(name: str) -> None:
    for argument, parameter in inspect.signature(CLASSES[name]).parameters.items():
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, "hides keys"
        assert parameter.annotation is not inspect.Parameter.empty, argument
        default = parameter.default
        plain = default is None or isinstance(default, (int, float, str)) or dataclasses.is_dataclass(default)
        assert default is inspect.Parameter.empty or plain, argument


@every_callback
def test_it_is_built_from_yaml_and_written_back(name: str) -> None:
    parser, parsed = from_yaml(name)
    assert type(parser.instantiate(parsed).callback) is CLASSES[name]
    written = parser.dump(parsed)
    assert parser.dump(parser.parse_string(written)) == written


def from_yaml(name: str) -> tuple[LightningArgumentParser, Any]:
    """A parser of callbacks, and what it reads of this one with its arguments."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    path = f"{CLASSES[name].__module__}.{name}"
    text = yaml.safe_dump({"callback": {"class_path": path, "init_args": _plain(ENTRIES[name].acts)}})
    return parser, parser.parse_string(text)


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}


# -- beside a checkpoint or an evaluation that knows nothing of it ---------------------------------------------------


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps that has the counters and nothing else of ours."""
    trainer = fit(HOST, Progress(), steps=2, poison={})
    path = tmp_path_factory.mktemp("stranger") / "a.ckpt"
    trainer.save_checkpoint(path)
    return path


@every_callback
def test_resumes_from_a_checkpoint_that_never_had_it(name: str, stranger: Path) -> None:
    counters = [] if name == "Progress" else [Progress()]
    trainer = fit(HOST, *own((name,)), *counters, steps=4, poison={}, resume=stranger)
    assert trainer.global_step == 4


@every_callback
def test_a_validation_before_the_fit_leaves_the_trainer_as_found(name: str) -> None:
    trainer = quiet_trainer(*own((name,)), accumulate_grad_batches=3, check_val_every_n_epoch=None)
    trainer.validate(TinyModule(), TinyData(validation_batches=1), verbose=False)
    assert trainer.accumulate_grad_batches == 3
