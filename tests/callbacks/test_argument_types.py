from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import numpy as np
import pytest
import torch
from contract_entries import CLASSES

from lit_stable.callbacks import (
    AdaGC,
    Alarm,
    BatchSizeWarmup,
    Detectors,
    EightBitAdam,
    GradClip,
    GradSpikeSkip,
    LROverride,
    Recovery,
    ScriptedSkip,
    TokenStatistics,
    ValidateEverySteps,
    WeightMonitor,
    ZClip,
)
from lit_stable.callbacks.argument_types import rule, wrong_parts
from lit_stable.callbacks.base import MisconfigurationException, StabilityCallback
from lit_stable.callbacks.recovery_rungs import RungOptions
from lit_stable.callbacks.spike_alarm import SpikeAlarm
from lit_stable.callbacks.surge import Surge

if TYPE_CHECKING:
    from nowhere import Unknown


class Host(StabilityCallback):
    def __init__(self, word: Literal["one", "two"] | list[str] | None = None, size: Literal[8, 32] = 8) -> None:
        self.given = word, size


LEGAL: list[tuple[Any, list[Any]]] = [
    (int, [3, np.int64(3), np.uint8(3), torch.tensor(3)]),
    (float, [1, 1.5, float("nan"), np.float32(1.5), np.int32(2), torch.tensor(1.5), Fraction(1, 3)]),
    (bool, [True, np.bool_(True), torch.tensor(True)]),
    (str, ["a", Path("a"), np.str_("a")]),
    (int | None, [3, None]),
    (Literal["a", "b"] | None, ["a", None]),
    (Literal[8, 32], [8, np.int64(32)]),
    (list[int], [[1], (1, 2), range(3), [], np.arange(3), torch.arange(3)]),
    (list[str], [["a"], ("a",), {"a"}]),
    (list[list[int]] | None, [[[1], (2, 3)], None]),
    (tuple[float, float], [(0.9, 0.95), [0.9, 1]]),
    (dict[str, str | int], [{"a": 1, "b": "c"}, {}]),
    (RungOptions, [{"do": "wait", "steps": 10}, {"unknown": 1}]),  # which keys there are, the class says
    (ZClip | None, [ZClip(), {"decay": 0.5}, {}, None]),
    (dict[str, ZClip], [{"a": ZClip(), "b": {"decay": 0.5}}]),
    (Callable[[int], int], [3]),  # not judged
    (torch.Tensor | float, ["x"]),
    (dict, [{1: 2}]),
    (list, [[1, "a"]]),
]


@pytest.mark.parametrize(("hint", "value"), [(hint, value) for hint, values in LEGAL for value in values])
def test_what_may_stand_there(hint: Any, value: Any) -> None:
    assert wrong_parts("x", value, hint) == []


WRONG: list[tuple[Any, str, list[Any]]] = [
    (
        int,
        "a whole number",
        [3.0, "3", True, None, np.float64(3), np.bool_(True), torch.tensor(3.0), torch.tensor([3])],
    ),
    (float, "a number", ["1", False, None, 1j, [1.0], np.ones(2), torch.ones(1), torch.tensor(True), np.bool_(1)]),
    (bool, "True or False", [0, "true", None, [True], torch.tensor([True])]),
    (str, "a string", [1, None, ["a"], b"a"]),
    (int | None, "a whole number, or None", [1.5, "none"]),
    (int | str, "a whole number, or a string", [1.5, None, True]),
    (Literal["a", "b"] | None, "one of a, b, or None", ["c", 1, ["a"], np.ones(2), torch.ones(2)]),
    (list[int], "a list of whole numbers", [3, "12", None, {1: 2}, torch.tensor(3)]),
    (list[list[int]] | None, "a list of lists of whole numbers, or None", [3]),
    (tuple[float, float], "a list of numbers", [0.9]),
    (list[str | int], "a list of strings or whole numbers", ["a"]),
    (dict[str, str | int], "a mapping", [["a"], "a", 3]),
    (list[RungOptions], "a list of mappings of do, steps, within", ["wait"]),
    (
        ZClip | None,
        "`ZClip(z_threshold, decay, warmup_steps)`, or a mapping with some of these keys, or None",
        [3, {"a": 1}],
    ),
    (list[Literal["a", "b"]], "a list of a, b", ["a"]),
]


@pytest.mark.parametrize(
    ("hint", "expected", "value"), [(hint, said, value) for hint, said, values in WRONG for value in values]
)
def test_what_may_not(hint: Any, expected: str, value: Any) -> None:
    ((place, found, own),) = wrong_parts("x", value, hint)
    assert place == "x"
    assert found is value
    assert rule(own).startswith(expected)


@pytest.mark.parametrize(
    ("hint", "value", "places"),
    [
        (list[int], [1, "2", 3.0], ["x[1]", "x[2]"]),
        (list[list[int]] | None, [[1], ["a"]], ["x[1][0]"]),
        (tuple[float, float], (0.9, "0.95"), ["x[1]"]),
        (dict[str, str | int], {"a": 1.5}, ["x['a']"]),
        (list[RungOptions], [{"do": "wait", "steps": "10", "drop": 1}], ["x[0]['steps']", "x[0]['drop']"]),
        (ZClip, {"decay": "0.5"}, ["x['decay']"]),
        (list[int] | list[dict[str, int]] | str, [{"a": "b"}], ["x[0]['a']"]),
    ],
)
def test_what_is_wrong_inside_is_told_with_its_place(hint: Any, value: Any, places: list[str]) -> None:
    assert [place for place, *_ in wrong_parts("x", value, hint)] == places


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (lambda: GradClip("1"), ["`GradClip(max_norm='1')`: must be a number, or None."]),
        (
            lambda: GradClip(schedule=[{"from": "0", "max_norm": 1.0}], action="atc", unit=3),
            [
                "`GradClip(schedule[0]['from']='0')`: must be a whole number.",
                "`GradClip(unit=3)`: must be one of steps, samples, tokens.",
                "`GradClip(action='atc')`: must be one of act, log.",
            ],
        ),
        (lambda: AdaGC(decay="0.9"), ["`AdaGC(decay='0.9')`: must be a number."]),
        (lambda: GradClip(adaptive={"decay": [1]}), ["`GradClip(adaptive['decay']=[1])`: must be a number."]),
        (lambda: SpikeAlarm(signals="loss"), ["`SpikeAlarm(signals='loss')`: must be a list of strings."]),
        (lambda: LROverride(start=1.5, factor=0.5), ["`LROverride(start=1.5)`: must be a whole number, or None."]),
        # One that is refused hides no other, and nothing is said of the default that stands in for it.
        (
            lambda: Alarm(every_seconds=-1.0),
            ["`Alarm(command=None, webhook=None)`: takes one", "`Alarm(every_seconds=-1.0)`"],
        ),
        (
            lambda: WeightMonitor(every_steps=0),
            ["`WeightMonitor(every_steps=0)`: must be"],
        ),
        (
            lambda: TokenStatistics(0, ngram=0, vocab_size="1"),
            [
                "`TokenStatistics(every_steps=0)`: must be",
                "`TokenStatistics(ngram=0)`: must be",
                "`TokenStatistics(vocab_size='1')`: must be",
            ],
        ),
        (
            lambda: Recovery([{"do": "wait", "steps": 1}], {"spike": "sit"}, keep=0),
            ["`Recovery`: rung 1: steps=1: must be at least 5", "`Recovery(keep=0)`: must be at least 1."],
        ),
        (lambda: Recovery(keep="3"), ["`Recovery(keep='3')`: must be a whole number."]),
        (lambda: Alarm(webhook=3), ["`Alarm(webhook=3)`: must be a string, or None."]),
        (
            lambda: GradSpikeSkip(window=None, threshold=True),
            ["`GradSpikeSkip(threshold=True)`: must be a", "`GradSpikeSkip(window=None)`: must be a whole number."],
        ),
        (lambda: ScriptedSkip("10-20"), ["`ScriptedSkip(steps='10-20')`: must be a list of strings or whole numbers."]),
        # What a class says itself comes first, and an argument is told of once.
        (
            lambda: EightBitAdam(min_8bit_size=True, on_load=1),
            [
                "`EightBitAdam(min_8bit_size=True)`: must be a whole number of elements, 1 or more.",
                "`EightBitAdam(on_load=1)`: must be one of refuse, convert.",
            ],
        ),
        (lambda: ValidateEverySteps(2.5), ["`ValidateEverySteps(every=2.5)`: must be a count of steps"]),
        (
            lambda: GradClip(max_norm=-1, action=True),
            ["`GradClip(max_norm=-1)`: must be a finite", "`GradClip(action=True)`: must be one of act, log."],
        ),
    ],
)
def test_a_callback_says_all_that_is_wrong_where_it_is_made(make: Callable[[], Any], lines: list[str]) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        make()
    found = str(caught.value).split("\n")
    assert len(found) == len(lines), found
    assert all(one.startswith(start) for one, start in zip(found, lines, strict=True)), found


def test_a_mapping_becomes_the_options_that_it_stands_for() -> None:
    detectors = Detectors(spike={"z_score": 7.5}, surge=False)
    assert detectors.spike == SpikeAlarm(z_score=7.5)
    with pytest.raises(MisconfigurationException, match=r"`Detectors\(spike=\{'z': 1\}\)`: must be `SpikeAlarm\(sig"):
        Detectors(spike={"z": 1})
    with pytest.raises(MisconfigurationException, match=r"`Detectors\(plateau=Surge\(.*: must be `Plateau\("):
        Detectors(plateau=Surge())


def test_what_other_projects_pass_is_kept_as_it_is(tmp_path: Path) -> None:
    assert Recovery(folder=tmp_path).folder == tmp_path
    assert WeightMonitor(np.int64(5)).every_steps == 5
    assert GradClip(torch.tensor(0.5)).max_norm == 0.5
    assert Alarm(command=Path("notify")).command == "notify"


def test_the_annotations_of_every_callback_can_be_read() -> None:
    for cls in CLASSES.values():
        get_type_hints(cls.__init__)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(MisconfigurationException) as caught:
        GradClip("x" * 5000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("given", [(), ("one",), (["three"], 32), (None, 8)])
def test_the_listed_words_and_what_may_stand_in_their_place_are_taken(given: tuple[Any, ...]) -> None:
    assert Host(*given).given == (*given, *(None, 8)[len(given) :])


def test_all_others_are_refused_in_one_sentence_each() -> None:
    with pytest.raises(MisconfigurationException) as caught:
        Host("three", size=16)  # type: ignore[arg-type]
    assert str(caught.value).split("\n") == [
        "`Host(word='three')`: must be one of one, two, or a list of strings, or None.",
        "`Host(size=16)`: must be one of 8, 32.",
    ]


def test_a_subclass_passes_words_up_under_its_own_name() -> None:
    class Mine(Host):
        def __init__(self, word: Any, **kwargs: int) -> None:
            super().__init__(word, **kwargs)  # type: ignore[arg-type]

    assert Mine(None, size=32).given == (None, 32)
    with pytest.raises(MisconfigurationException, match=r"`Mine\(word='three'\)`: must be one of one, two"):
        Mine("three")


def test_what_is_no_argument_and_what_nobody_can_resolve_is_left_to_python() -> None:
    class Strange(StabilityCallback):
        def __init__(self, word: Unknown = "any") -> None:
            self.word = word

    assert Strange().word == "any"
    with pytest.raises(TypeError, match="unexpected keyword argument 'words'"):
        Host(words="one")  # type: ignore[call-arg]


def test_what_somebody_elses_class_does_when_it_is_made_is_done_once() -> None:
    made: list[Any] = []

    class Opens(StabilityCallback):
        def __init__(self, size: int = 1, name: str = "") -> None:
            made.append(size)
            if size < 1:
                raise MisconfigurationException(f"`Opens(size={size})`: must be at least 1.")

    for size, lines in (
        (0, "`Opens(size=0)`: must be at least 1."),
        ("2", "`Opens(size='2')`: must be a whole number."),
    ):
        with pytest.raises(MisconfigurationException) as raised:
            Opens(size)  # type: ignore[arg-type]
        assert str(raised.value) == lines
    assert made == [0]


def test_signatures_stay_in_sight() -> None:
    assert list(inspect.signature(BatchSizeWarmup).parameters)[:2] == ["ramp", "global_batch"]
    assert list(inspect.signature(ZClip).parameters) == ["z_threshold", "decay", "warmup_steps"]
