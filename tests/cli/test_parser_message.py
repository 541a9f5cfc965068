"""The messages of the installed jsonargparse, read through a parser, not copied: a new wording fails here."""

from abc import ABC, abstractmethod
from argparse import ArgumentError
from typing import Literal

import pytest
from jsonargparse import ArgumentParser

from lit_stable.cli.parser_message import class_options, is_incomplete, reason, rejected_option


class Base:
    def __init__(self, size: int, **kwargs):
        pass


class Abstract(ABC):
    @abstractmethod
    def act(self):
        pass


class Derived(Base):
    def __init__(self, depth: int = 1, **kwargs):
        super().__init__(**kwargs)


def message(annotation, value):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--key", type=annotation)
    with pytest.raises(ArgumentError) as caught:
        parser.parse_object({"key": value}, defaults=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int, "x", "must be an int, not 'x'"),
        (float | None, "x", "must be a float or null, not 'x'"),
        (bool, "x", "must be true or false, not 'x'"),
        (Literal["a", "b"], "c", "must be one of a, b, not 'c'"),
        (Literal["a"] | Literal["b"] | int, "c", "must be one of a, b or an int, not 'c'"),
        (list[int], [1, "x"], "must be an int, not x"),
        (Base | None, 5, "must be a Base or null, not 5"),
        (Base, {"size": "x"}, "size must be an int, not x"),
        (Base | None, "x", "must be a mapping of its options or null, not 'x'"),
        (Abstract | None, {}, "must be an Abstract or null, not {}"),
        (Abstract | None, {"a": 1}, "must be a mapping with class_path or null, not {'a': 1}"),
    ],
)
def test_a_refused_type_is_named_in_plain_words(annotation, value, expected):
    assert reason(message(annotation, value), value, "key") == expected


def test_the_refused_argument_of_a_class_and_the_legal_ones_are_told():
    text = message(Derived, {"size": 1, "dept": 2})
    assert rejected_option(text) == "dept"
    assert class_options(text) == ["depth", "size"]


def test_a_missing_argument_is_told_apart_from_a_wrong_one():
    assert is_incomplete(message(Base, {}))
    assert not is_incomplete(message(Base, {"size": "x"}))
    assert reason(message(Base, {})) == "key.size: missing; set in a recipe or on the command line"


def test_a_message_about_no_class_has_no_class_options():
    assert class_options(message(int, "x")) == []
    assert rejected_option(message(int, "x")) is None
