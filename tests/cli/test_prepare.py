"""`lit-stable prepare`."""

from __future__ import annotations

import json

import pytest
from tiny_recipe import command

from lit_stable.data.store import TokenStore


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"document {number}" for number in range(100)))
    return path


def test_text_becomes_a_store_and_a_summary_is_printed(text, tmp_path):
    words = ["--tokenizer", "bytes", "--validation_fraction", "0.2", "--separator", "\n\n"]
    done = command("prepare", text, "--out", tmp_path / "store", *words)
    assert done.code == 0
    counts = {split: TokenStore(tmp_path / "store" / split).num_tokens for split in ("train", "validation")}
    assert sum(counts.values()) == 10 * len("document 0") + 90 * len("document 00") + 100  # one end-of-text each
    assert f"train {counts['train']:,} tokens" in done.out
    assert done.out.startswith(f"{tmp_path / 'store'}: ")


def test_several_inputs_and_globs_are_taken(text, tmp_path):
    (tmp_path / "more.jsonl").write_text('{"text": "abc"}\n' * 3)
    words = ["--tokenizer", "bytes", "--validation_fraction", "0"]
    done = command("prepare", text, str(tmp_path / "*.jsonl"), "--out", tmp_path / "store", *words)
    assert done.code == 0, done.err
    assert "in 4 documents" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["empty.txt", "--tokenizer", "bytes"], "input: has no text in it, so there is nothing to write; check the"),
        (["none.txt", "--tokenizer", "bytes"], "input none.txt: matches no file."),
        (["text.txt", "--tokenizer", "bits"], "tokenizer=bits: no such file; give bytes, bpe:SIZE, unigram:SIZE,"),
        (["text.txt", "--tokenizer", "bytes", "--filter", "score"], "filter=score: must read KEY >= VALUE"),
    ],
)
def test_unusable_input_ends_with_2_and_leaves_nothing(text, tmp_path, words, sentence):
    (tmp_path / "empty.txt").write_text("")
    before = sorted(tmp_path.iterdir())
    done = command("prepare", *words, "--out", "store")  # every test has tmp_path as its current folder
    assert done.code == 2
    assert done.err.startswith(f"lit-stable prepare: {sentence}")
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_folder_is_left_alone(text, tmp_path):
    (tmp_path / "store").mkdir()
    done = command("prepare", text, "--tokenizer", "bytes", "--out", "store")
    assert (done.code, done.err) == (
        2,
        "lit-stable prepare: out=store: exists already; choose another folder or delete it.\n",
    )


def test_bad_lines_are_shown_and_strict_stops(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\noops\n')
    words = ["prepare", "a.jsonl", "--tokenizer", "bytes", "--validation_fraction", "0", "--out", "store"]
    done = command(*words, "--strict")
    assert (done.code, done.err.split(": Exp")[0]) == (2, "lit-stable prepare: a.jsonl:2")
    done = command(*words)
    assert done.code == 0
    assert "1 could not be read and was left out:\n  a.jsonl:2: Expecting value" in done.out


def test_every_option_reaches_the_work(tmp_path):
    records = [{"body": "word " * 9, "when": f"2020-01-{n + 1:02d}", "score": n, "lang": "en"} for n in range(20)]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(map(json.dumps, [*records, {"body": "\\\\" * 200, "when": 0, "score": 9}]))
    )
    options = {
        "--tokenizer": "unigram:300:phrases",
        "--text_key": "body",
        "--date_key": "when",
        "--keep": "lang",
        "--filter": "score >= 5",
        "--order": "date",
        "--validation_from": "2020-01-15",
        "--artefacts": "reject",
        "--limits.escapes": "0.5",
        "--workers": "2",
    }
    words = [word for pair in options.items() for word in pair]
    done = command("prepare", "a.jsonl", "--out", "store", *words)
    assert done.code == 0, done.err
    train, validation = (TokenStore(tmp_path / "store" / split) for split in ("train", "validation"))
    assert train.documents["date"].tolist() == list(range(20200106, 20200115))
    assert validation.documents["date"].tolist() == list(range(20200115, 20200121))
    assert train.keys == ["date", "source", "lang", "score"]
    assert "filter score >= 5:\n  store: 16 of 21 documents kept" in done.out
    assert "documents that look like artefacts (rejected; listed in artefacts.jsonl):" in done.out


def test_ctrl_c_says_that_it_goes_on(text, monkeypatch):
    def interrupt(self, piece, advance):
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_stable.data.text.tokenising.PieceWorker.__call__", interrupt)
    done = command("prepare", text, "--tokenizer", "bytes", "--out", "store")
    assert (done.code, done.err) == (130, "lit-stable prepare: interrupted.\n")


@pytest.mark.parametrize(
    "words", [[], ["text.txt", "--tokenizer", "bytes"], ["text.txt", "--out", "o", "--tokeniser", "x"]]
)
def test_missing_and_unknown_arguments_end_with_2(text, words):
    with pytest.raises(SystemExit) as ended:
        command("prepare", *words)
    assert ended.value.code == 2


def test_a_line_that_is_nested_without_end_is_left_out_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    deep = '{"text":' + "[" * 100_000 + "]" * 100_000 + "}"
    path.write_text(f'{{"text": "one"}}\n{deep}\n{{"text": "two"}}\n')
    words = ["--tokenizer", "bytes", "--validation_fraction", "0"]
    done = command("prepare", path, "--out", tmp_path / "out", *words)
    assert done.code == 0, done.err
    assert f"{path}:2: is nested too deeply for a JSON reader" in done.out + done.err
    done = command("prepare", path, "--out", tmp_path / "strict", *words, "--strict")
    assert (done.code, f"{path}:2: is nested too deeply" in done.err) == (2, True), done.err


def test_a_folder_below_a_file_is_refused(text, tmp_path):
    (tmp_path / "file").touch()
    done = command("prepare", text, "--out", tmp_path / "file" / "x", "--tokenizer", "bytes")
    assert done.code == 2
    assert done.err == (
        f"lit-stable prepare: out={tmp_path}/file/x: cannot be written, since {tmp_path}/file is a file; choose another"
        " folder.\n"
    )
