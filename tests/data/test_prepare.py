from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from lit_stable.data.prepare import prepare, split_of
from lit_stable.data.store import TokenStore
from lit_stable.data.tokenizer import load_tokenizer


def silent(_: str) -> None:
    """A report that nobody reads."""


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    records = [{"text": f"document {number} " * 5, "source": f"s{number % 2}"} for number in range(300)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_both_splits_decode_to_the_documents(tmp_path, corpus, tokenizer):
    summary = prepare([corpus], tmp_path / "out", tokenizer, 0.2, report=silent)
    texts = []
    for split in ("train", "validation"):
        store = TokenStore(tmp_path / "out" / split)
        assert store.split == split
        assert store.num_documents == summary.num_documents[split]
        assert store.num_tokens == summary.num_tokens[split]
        assert set(store.sources) == {"s0", "s1"}
        text = load_tokenizer(store.tokenizer_path).decode(store.read(0, store.num_tokens))
        texts += text.split("<|endoftext|>")[:-1]
    assert sorted(texts) == sorted(f"document {number} " * 5 for number in range(300))
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["sha256"] == summary.sha256


def test_validation_is_chosen_by_content_not_by_position(tmp_path, corpus):
    lines = corpus.read_text().splitlines(keepends=True)
    corpus.write_text("".join(reversed(lines)))
    prepare([corpus], tmp_path / "out", "bytes", 0.2, report=silent)
    store = TokenStore(tmp_path / "out" / "validation")
    text = bytes(np.where(store.read(0, store.num_tokens) == 256, 10, store.read(0, store.num_tokens)).tolist())
    expected = {line for number in range(300) if split_of(line := f"document {number} " * 5, 0.2) == "validation"}
    assert set(text.decode().splitlines()) == expected


def test_validation_has_about_its_share():
    share = np.mean([split_of(f"text {number}", 0.1) == "validation" for number in range(5000)])
    assert abs(share - 0.1) < 0.015  # standard deviation 0.0042


def test_no_fraction_means_no_validation_split(tmp_path, corpus):
    summary = prepare([corpus], tmp_path / "out", "bytes", 0.0, report=silent)
    assert summary.num_documents == {"train": 300}
    assert not (tmp_path / "out" / "validation").exists()


def test_empty_documents_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text("one--two----three")
    summary = prepare([tmp_path / "a.txt"], tmp_path / "out", "bytes", 0.0, separator="--", report=silent)
    assert (summary.num_documents["train"], summary.num_empty) == (3, 1)
    assert summary.num_bytes == len("onetwothree")


def test_the_hash_tells_corpora_apart_by_content_and_cut(tmp_path):
    for name, content in (("a", "ab--c"), ("b", "a--bc"), ("c", "ab--c")):
        (tmp_path / name).write_text(content)
    hashes = [
        prepare([tmp_path / name], tmp_path / f"out-{name}", "bytes", 0.0, separator="--", report=silent).sha256
        for name in "abc"
    ]
    assert hashes[0] == hashes[2] != hashes[1]


def test_progress_ends_with_the_summary(tmp_path, corpus):
    lines: list[str] = []
    prepare([corpus], tmp_path / "out", "bpe:300", 0.1, report=lines.append)
    assert lines[0] == "out: training the tokenizer bpe:300"
    assert "documents; 0 empty ones left out" in lines[-1]


def test_all_bad_arguments_are_told_at_once(tmp_path):
    with pytest.raises(ValueError, match="tokenizer=bpe:2: the size must") as error:
        prepare(["x"], tmp_path, "bpe:2", 1.0, separator="", report=silent)
    text = str(error.value)
    assert "validation_fraction=1.0: must be at least 0 and below 1." in text
    assert "separator='': must not be empty" in text
    assert f"out={tmp_path}: exists already" in text


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": "  \\n"}\n'])
def test_an_empty_input_never_becomes_a_store(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match="input: has no text in it"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", report=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_bad_line_leaves_no_folder(tmp_path, corpus):
    corpus.write_text(corpus.read_text() + "oops\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl:301: .*1 bad line in all"):
        prepare([corpus], tmp_path / "out", "bytes", report=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_too_few_documents_for_a_split_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "a.txt").write_text("only one")
    with pytest.raises(
        ValueError, match=r"validation_fraction=0\.01: leaves the validation split of 1 documents empty"
    ):
        prepare([tmp_path / "a.txt"], tmp_path / "out", "bytes", report=silent)


def test_two_processes_at_once_and_a_kill_leave_one_whole_folder(tmp_path, corpus):
    code = (
        "import sys; from lit_stable.data.prepare import prepare\n"
        "def report(line):\n"
        "    if sys.argv[3] == 'die': import os; os.kill(os.getpid(), 9)\n"
        "prepare([sys.argv[1]], sys.argv[2], 'bpe:300', 0.2, report=report)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def start(mode: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, str(corpus), str(tmp_path / "out"), mode]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    assert start("die").wait() == -9
    assert not (tmp_path / "out").exists()
    results = sorted(process.wait() for process in [start("live"), start("live")])
    assert results[0] == 0
    assert TokenStore(tmp_path / "out" / "train").num_documents > 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "out"]
