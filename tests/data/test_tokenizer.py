from __future__ import annotations

import json

import numpy as np
import pytest

from lit_stable.data.tokenizer import check_tokenizer_spec, load_tokenizer, make_tokenizer

TEXT = "def naïve(x):\n    return '日本' + x\t# 🙂 <|endoftext|> \r\n\x00"


def test_bytes_are_their_own_ids():
    tokenizer = make_tokenizer("bytes", [])
    (ids,) = tokenizer.encode_batch([TEXT])
    assert bytes(ids.tolist()) == TEXT.encode()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode_batch([""])[0].dtype == np.int64


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_any_text_comes_back_exactly(spec):
    tokenizer = make_tokenizer(spec, ["return x return x " * 50])
    (ids,) = tokenizer.encode_batch([TEXT])
    assert tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_text_that_spells_end_of_text_does_not_end_it(spec):
    tokenizer = make_tokenizer(spec, ["some text to train on"])
    assert tokenizer.eot_id not in tokenizer.encode_batch(["a<|endoftext|>b"])[0]
    assert tokenizer.decode([tokenizer.eot_id]) == "<|endoftext|>"


def test_bpe_learns_what_is_frequent():
    tokenizer = make_tokenizer("bpe:270", ["banana banana banana"])
    assert tokenizer.vocab_size <= 270
    assert len(tokenizer.encode_batch(["banana"])[0]) == 1


def test_training_gives_the_same_vocabulary_again(tmp_path):
    texts = [f"value_{number} = compute({number})" for number in range(500)]
    first, second = (make_tokenizer("bpe:400", texts).save(tmp_path / name) for name in ("a", "b"))
    assert first == second


def test_a_saved_tokenizer_reads_back(tmp_path):
    tokenizer = make_tokenizer("bpe:300", ["return x return x"])
    tokenizer.save(tmp_path / "tokenizer.json")
    for loaded in (load_tokenizer(tmp_path / "tokenizer.json"), make_tokenizer(str(tmp_path / "tokenizer.json"), [])):
        assert (loaded.vocab_size, loaded.eot_id) == (tokenizer.vocab_size, tokenizer.eot_id)
        assert np.array_equal(loaded.encode_batch([TEXT])[0], tokenizer.encode_batch([TEXT])[0])


@pytest.mark.parametrize("spec", ["bpe:256", "bpe:", "bpe:many"])
def test_vocabulary_sizes_that_cannot_be_are_refused(spec):
    assert "integer of at least 257" in str(check_tokenizer_spec(spec))
    with pytest.raises(ValueError, match=f"tokenizer={spec}: the size must be an integer of at least 257"):
        make_tokenizer(spec, [])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer=gone\.json: no such file; give bytes, bpe:SIZE or the path"):
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
