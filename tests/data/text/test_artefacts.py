from __future__ import annotations

import numpy as np
import pytest

from lit_stable.data.text.artefacts import ArtefactLimits, Measures, measure
from lit_stable.data.tokenizer import make_tokenizer

BYTES = make_tokenizer("bytes", [])


def measured(text: str) -> Measures:
    return measure(text.encode(), BYTES.encode_batch([text])[0])


def marks(text: str) -> set[str]:
    return set(ArtefactLimits().exceeded(measured(text)))


PROSE = " ".join(
    f"The {n * 7919 % 10007}th word of clause {n} differs from its neighbours by chance." for n in range(60)
)
CODE = "".join(f"    value_{n * 31 % 97} = re.sub(r'\\s+\\d*', '\\t', line[{n}])\n" for n in range(80))


@pytest.mark.parametrize("text", [PROSE, CODE, "short", "", "C:\\Users\\me\\a\\b\\c", "\\frac{\\alpha}{\\beta}" * 3])
def test_ordinary_text_is_left_alone(text):
    assert marks(text) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\" * 5000, {"escapes", "repeats", "entropy", "compression"}),
        ("\\n" * 5000, {"escapes", "repeats", "entropy", "compression"}),
        ('\\\\\\"' * 50, {"escapes", "repeats", "entropy"}),
        (PROSE + "\\ " * 400, {"escapes"}),
        ("buy now! " * 500, {"repeats", "entropy", "compression"}),
    ],
)
def test_what_a_broken_pipeline_makes_is_marked(text, expected):
    assert marks(text) >= expected


def test_the_share_of_escapes_is_that_of_their_runs():
    assert measured("x" * 90 + "\\" * 10).escapes == pytest.approx(0.1)
    assert measured("x" * 90 + "\\" * 7).escapes == 0.0  # a run of seven is none
    assert measured("\\n" * 8 + "yyy" + "\\t" * 8).escapes == pytest.approx(30 / 35)


def test_entropy_is_one_when_all_trigrams_differ_and_nought_when_none_does():
    assert measure(b"", np.arange(200)).entropy == pytest.approx(1.0)
    assert measure(b"", np.zeros(200, dtype=np.int64)).entropy == 0.0
    two = np.resize([0, 1], 202)  # two trigrams, 100 times each
    assert measure(b"", two).entropy == pytest.approx(np.log(2) / np.log(200))


def test_limits_out_of_range_are_told():
    assert ArtefactLimits().problems() == []
    assert ArtefactLimits(escapes=2.0, compression=0.0).problems() == [
        "limits.escapes=2.0: must be between 0 and 1.",
        "limits.compression=0.0: must be at least 1.",
    ]
