from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

import pytest

from lit_stable.callbacks import BatchSizeWarmup
from lit_stable.callbacks.base import MisconfigurationException, StabilityCallback

if TYPE_CHECKING:
    from nowhere import Unknown


class Host(StabilityCallback):
    def __init__(self, word: Literal["one", "two"] | list[str] | None = None, size: Literal[8, 32] = 8) -> None:
        self.given = word, size


@pytest.mark.parametrize("given", [(), ("one",), (["three"], 32), (None, 8)])
def test_the_listed_words_and_what_may_stand_in_their_place_are_taken(given: tuple[Any, ...]) -> None:
    assert Host(*given).given == (*given, *(None, 8)[len(given) :])


def test_all_others_are_refused_in_one_sentence_each() -> None:
    with pytest.raises(MisconfigurationException) as caught:
        Host("three", size=16)  # type: ignore[arg-type]
    assert str(caught.value).split("\n") == [
        "`Host(word='three')`: must be one of one, two, or a list, or None.",
        "`Host(size=16)`: must be one of 8, 32.",
    ]


def test_a_subclass_passes_words_up_under_its_own_name() -> None:
    class Mine(Host):
        def __init__(self, word: Any) -> None:
            super().__init__(word)

    with pytest.raises(MisconfigurationException, match=r"`Mine\(word='three'\)`: must be one of one, two"):
        Mine("three")


def test_what_is_no_argument_and_what_nobody_can_resolve_is_left_to_python() -> None:
    class Strange(StabilityCallback):
        def __init__(self, word: Unknown = "any") -> None:
            self.word = word

    assert Strange().word == "any"
    with pytest.raises(TypeError, match="unexpected keyword argument 'words'"):
        Host(words="one")  # type: ignore[call-arg]


def test_signatures_stay_in_sight() -> None:
    assert list(inspect.signature(BatchSizeWarmup).parameters)[:2] == ["ramp", "global_batch"]
