from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from lit_stable.data.tokenizer import check_tokenizer_spec, load_tokenizer, make_tokenizer

TEXT = "def naïve(x):\n    return '日本' + x\t# 🙂 <|endoftext|> \r\n\x00"


def test_bytes_are_their_own_ids():
    tokenizer = make_tokenizer("bytes", [])
    text = TEXT + "".join(map(chr, range(0x800)))  # all bytes but those of longer characters
    (ids,) = tokenizer.encode_batch([text])
    assert bytes(ids.tolist()) == text.encode()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode_batch([""])[0].dtype == np.int64


@pytest.mark.parametrize("spec", ["bytes", "bpe:300", "unigram:300", "bpe:300:phrases", r"unigram:300:\S+|\s+"])
def test_any_text_comes_back_exactly(spec):
    tokenizer = make_tokenizer(spec, ["return x return x " * 50])
    (ids,) = tokenizer.encode_batch([TEXT])
    assert tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("spec", ["bytes", "bpe:300", "unigram:300"])
def test_text_that_spells_end_of_text_does_not_end_it(spec):
    tokenizer = make_tokenizer(spec, ["some text to train on"])
    assert tokenizer.eot_id not in tokenizer.encode_batch(["a<|endoftext|>b"])[0]
    assert tokenizer.decode([tokenizer.eot_id]) == "<|endoftext|>"


def test_bpe_learns_what_is_frequent():
    tokenizer = make_tokenizer("bpe:270", ["banana banana banana"])
    assert tokenizer.vocab_size <= 270
    assert len(tokenizer.encode_batch(["banana"])[0]) == 1


def test_training_gives_the_same_vocabulary_again(tmp_path):
    """In processes of their own, where the package's tables have another order each time."""
    code = (
        "import sys; from pathlib import Path; from lit_stable.data.tokenizer import make_tokenizer\n"
        "texts = [f'value_{number} = compute({number}) or the other value of it' for number in range(300)]\n"
        "for spec in ('bpe:400', 'unigram:400', 'unigram:300:phrases'):\n"
        "    print(make_tokenizer(spec, texts).save(Path(sys.argv[1])))\n"
    )
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run([*command, name], capture_output=True, check=True).stdout.split() for name in ("a", "b")
    )
    assert first == second
    assert len(set(first)) == 3


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_phrases_hold_several_words_and_every_digit_is_its_own(kind):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefg", k=4)) for _ in range(200)]
    texts = [f"{draw.choice(words)} new york {draw.choice(words)}, {draw.randint(1000, 9999)}" for _ in range(400)]
    tokenizer = make_tokenizer(f"{kind}:400:phrases", texts)
    pieces = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    assert any("new york" in piece for piece in pieces)
    digits = tokenizer.encode_batch(["1234"])[0]
    assert [tokenizer.decode([token]) for token in digits] == ["1", "2", "3", "4"]
    assert all(len(piece) == 1 for piece in pieces if any(character.isdigit() for character in piece))
    assert not any("," in piece and any(character.isalnum() for character in piece) for piece in pieces)


def test_an_expression_cuts_where_it_says(tmp_path):
    tokenizer = make_tokenizer("bpe:300:b|[^b]+", ["abcabcabc" * 50])
    assert [tokenizer.decode([token]) for token in tokenizer.encode_batch(["abca"])[0]] == ["a", "b", "ca"]


@pytest.mark.parametrize("cut", ["(", ""])
def test_an_expression_that_is_none_is_refused(cut):
    problem = check_tokenizer_spec(f"bpe:300:{cut}")
    assert ("is neither phrases, gpt2 nor a regular expression" if cut else "must not be empty") in str(problem)


def test_a_saved_tokenizer_reads_back(tmp_path):
    tokenizer = make_tokenizer("bpe:300", ["return x return x"])
    tokenizer.save(tmp_path / "tokenizer.json")
    for loaded in (load_tokenizer(tmp_path / "tokenizer.json"), make_tokenizer(str(tmp_path / "tokenizer.json"), [])):
        assert (loaded.vocab_size, loaded.eot_id) == (tokenizer.vocab_size, tokenizer.eot_id)
        assert np.array_equal(loaded.encode_batch([TEXT])[0], tokenizer.encode_batch([TEXT])[0])


@pytest.mark.parametrize("spec", ["bpe:256", "bpe:", "bpe:many", "unigram:256", "unigram::phrases"])
def test_vocabulary_sizes_that_cannot_be_are_refused(spec):
    assert "integer of at least 257" in str(check_tokenizer_spec(spec))
    with pytest.raises(ValueError, match=f"tokenizer={spec}: the size must be an integer of at least 257"):
        make_tokenizer(spec, [])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer=gone\.json: no such file; give bytes, bpe:SIZE, unigram:SIZE"):
        make_tokenizer("gone.json", [])
    with pytest.raises(ValueError, match=r"gone\.json: no such file"):
        load_tokenizer(tmp_path / "gone.json")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json: is not a tokenizer JSON"):
        load_tokenizer(tmp_path / "t.json")


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    path = tmp_path / "t.json"
    make_tokenizer("bytes", []).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": []}))
    with pytest.raises(ValueError, match="has none of the end-of-text tokens"):
        load_tokenizer(path)


def test_what_the_command_line_could_not_decode_is_refused():
    tokenizer = make_tokenizer("bytes", [])
    with pytest.raises(ValueError, match=r"text 'a\\udcff': is not UTF-8; give it in that encoding\."):
        tokenizer.encode(os.fsdecode(b"a\xff"))
