from __future__ import annotations

import filecmp
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lit_stable.data.prepare import prepare
from lit_stable.data.store import TokenStore
from lit_stable.data.tokenizer import load_tokenizer

SUPPORT = Path(__file__).parent.parent / "support"


def split_of(text: str, fraction: float) -> str:
    """Where a text goes, by the first 8 bytes of its SHA-256."""
    digest = hashlib.sha256(text.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"


def texts(store) -> list[str]:
    """The documents of a store of bytes."""
    tokens = store.read(0, store.num_tokens)
    return bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode().split("\0")[:-1]


def write_records(path, records) -> None:
    lines = "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


def files_in(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def differences(first, second) -> list[str]:
    assert files_in(first) == files_in(second)
    return [name for name in files_in(first) if not filecmp.cmp(first / name, second / name, shallow=False)]


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
    expected = [line for number in range(300) if split_of(line := f"document {number} " * 5, 0.2) == "validation"]
    assert sorted(texts(TokenStore(tmp_path / "out" / "validation"))) == sorted(expected)
    assert 30 < len(expected) < 90  # 60 expected, standard deviation 7


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


def test_bad_lines_are_left_out_counted_and_shown(tmp_path, corpus):
    corpus.write_text(corpus.read_text() + "oops\n" * 7 + '{"text": "good"}')
    (tmp_path / "b.txt").write_bytes(b"ab\xff")
    lines: list[str] = []
    summary = prepare([corpus, tmp_path / "b.txt"], tmp_path / "out", "bytes", report=lines.append)
    assert (summary.num_bad, sum(summary.num_documents.values())) == (8, 301)
    shown = lines.index("8 could not be read and were left out:")
    assert [line.split(": ")[0] for line in lines[shown + 1 : shown + 6]] == [
        f"  {tmp_path}/b.txt",
        *(f"  {corpus}:{number}" for number in range(301, 305)),
    ]
    assert lines[shown + 6] == "  ..."


def test_strict_stops_and_keeps_nothing_that_took_no_time(tmp_path, corpus):
    corpus.write_text(corpus.read_text() + "oops\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl:301: "):
        prepare([corpus], tmp_path / "out", "bytes", strict=True, report=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_input_of_bad_lines_alone_says_why_it_has_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text("oops\n" * 3)
    with pytest.raises(
        ValueError, match=r"input: has no text in it.*; 3 could not be read, the first .*a\.jsonl:1: Expec"
    ):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", report=silent)


def test_killed_after_the_result_had_its_name_the_same_command_gives_its_summary(tmp_path, corpus):
    summary = prepare([corpus], tmp_path / "out", "bytes", report=silent)
    work = tmp_path / "out.unfinished"
    work.mkdir()
    (work / "complete").touch()
    assert prepare([corpus], tmp_path / "out", "bytes", report=silent) == summary
    assert not work.exists()
    work.mkdir()  # of another command that began before the folder appeared
    with pytest.raises(FileExistsError, match=r"out: another process wrote it first\."):
        prepare([corpus], tmp_path / "out", "bytes", report=silent)


def test_too_few_documents_for_a_split_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "a.txt").write_text("only one")
    with pytest.raises(
        ValueError, match=r"validation_fraction=0\.01: leaves the validation split of 1 documents empty"
    ):
        prepare([tmp_path / "a.txt"], tmp_path / "out", "bytes", report=silent)
    # What was tokenised is kept for the command with another fraction.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.unfinished"]
    lines: list[str] = []
    prepare([tmp_path / "a.txt"], tmp_path / "out", "bytes", 0.0, report=lines.append)
    assert lines[0] == "out: going on; 1 of 1 pieces are done"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


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


def test_killed_at_any_moment_the_same_command_gives_the_same_bytes(tmp_path):
    (tmp_path / "in").mkdir()
    records = [
        {
            "text": f"document {n} " * (n % 9 + 1),
            "date": 20200101 + n * 7 % 28,
            "score": n * 31 % 97,
            "source": "ab"[n % 2],
        }
        for n in range(120)
    ]
    write_records(tmp_path / "in" / "a.jsonl", [*records[:80], "oops"])
    write_records(tmp_path / "in" / "b.jsonl.gz", records[80:])
    command = [sys.executable, str(SUPPORT / "kill_prepare.py"), str(tmp_path / "in"), str(tmp_path / "work"), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Input of several pieces."""
    monkeypatch.setattr("lit_stable.data.text.inputs.plan_pieces.__defaults__", (3000,))
    (tmp_path / "in").mkdir()
    for name in "abc":
        write_records(
            tmp_path / "in" / f"{name}.jsonl",
            [{"text": f"{name} {number} " * 4, "source": f"{name}{number % 3}", "lang": "de"} for number in range(60)],
        )
    return tmp_path / "in"


def test_the_number_of_processes_changes_nothing(tmp_path, many):
    for workers in (1, 3):
        prepare([many], tmp_path / str(workers) / "out", "bpe:300", 0.2, keep="lang", workers=workers, report=silent)
    assert differences(tmp_path / "1" / "out", tmp_path / "3" / "out") == []


def test_processes_end_with_their_parent_and_finished_pieces_are_used_again(tmp_path, many):
    code = (
        "import sys, time\n"
        "from lit_stable.data.prepare import prepare\n"
        "from lit_stable.data.text import inputs\n"
        "from lit_stable.data.text.progress_line import ProgressLine\n"
        "inputs.plan_pieces.__defaults__ = (3000,)\n"
        "def advance(self, step):\n"
        "    import multiprocessing\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    time.sleep(60)\n"
        "ProgressLine.advance = advance\n"
        "if __name__ == '__main__':\n"
        "    prepare([sys.argv[1]], sys.argv[2], 'bytes', 0.2, workers=2)\n"
    )
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, str(tmp_path / "program.py"), str(many), str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    children = [int(word) for word in process.stdout.readline().split()]
    while not any((tmp_path / "out.unfinished" / "parts").glob("*.npz")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(children) == 2
    while any(is_running(child) for child in children):
        time.sleep(0.01)
    lines: list[str] = []
    prepare([many], tmp_path / "out", "bytes", 0.2, report=lines.append)
    assert lines[0].startswith("out: going on; ")
    prepare([many], tmp_path / "again" / "out", "bytes", 0.2, report=silent)
    assert differences(tmp_path / "out", tmp_path / "again" / "out") == []


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, as it is where nobody collects orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_bad_lines_of_later_pieces_have_their_number_in_the_file(tmp_path, many):
    write_records(many / "b.jsonl", [*({"text": "x" * 100} for _ in range(70)), "oops", {"text": "end"}])
    lines: list[str] = []
    prepare([many], tmp_path / "out", "bytes", report=lines.append)
    assert any(line.startswith(f"  {many}/b.jsonl:71: ") for line in lines)


DATED = [
    {"text": f"text {number}", "date": 20220000 + 100 * month + 1, "score": number / 10, "source": "ab"[number % 2]}
    for number, month in enumerate([7, 3, 12, 1, 7, 5, 2, 9])
] + [{"text": "undated", "score": 0.9}]


@pytest.fixture
def dated(tmp_path):
    write_records(tmp_path / "dated.jsonl", DATED)
    return tmp_path / "dated.jsonl"


def test_kept_values_stand_beside_their_documents_in_both_splits(tmp_path, dated):
    prepare([dated], tmp_path / "out", "bytes", 0.4, keep="score, date", report=silent)
    found = {}
    for split in ("train", "validation"):
        store = TokenStore(tmp_path / "out" / split)
        assert store.keys == ["date", "source", "score"]
        scores = store.values("score", 0, store.num_documents)
        found |= {text: scores.value(row) for row, text in enumerate(texts(store))}
    assert found == {record["text"]: record["score"] for record in DATED}


def test_by_date_documents_stand_oldest_first(tmp_path, dated):
    lines: list[str] = []
    prepare([dated], tmp_path / "out", "bytes", 0.0, order="date", report=lines.append)
    store = TokenStore(tmp_path / "out" / "train")
    assert texts(store) == ["undated", *(f"text {number}" for number in (3, 6, 1, 5, 0, 4, 7, 2))]
    assert store.documents["date"].tolist() == sorted(record.get("date", 0) for record in DATED)
    assert "1 documents have no date and stand before all others" in lines


def test_validation_may_be_the_future(tmp_path, dated):
    lines: list[str] = []
    prepare([dated], tmp_path / "out", "bytes", validation_from="2022-07-01", report=lines.append)
    assert texts(TokenStore(tmp_path / "out" / "validation")) == ["text 0", "text 2", "text 4", "text 7"]
    assert texts(TokenStore(tmp_path / "out" / "train")) == ["text 1", "text 3", "text 5", "text 6", "undated"]
    assert "1 documents have no date and went to train" in lines
    with pytest.raises(
        ValueError, match=r"validation_from=20300101: leaves the validation split of 9 documents empty; 1"
    ):
        prepare([dated], tmp_path / "none", "bytes", validation_from="2030-01-01", report=silent)


def test_a_filter_tells_what_it_keeps_of_each_source(tmp_path, dated):
    lines: list[str] = []
    prepare([dated], tmp_path / "out", "bytes", 0.0, filter="top 0.5 by score", report=lines.append)
    store = TokenStore(tmp_path / "out" / "train")
    assert texts(store) == ["text 4", "text 5", "text 6", "text 7", "undated"]
    assert "score" in store.keys
    shown = lines.index("filter top 0.5 by score:")
    assert lines[shown + 1 : shown + 4] == [
        "  a: 2 of 4 documents kept",
        "  b: 2 of 4 documents kept",
        "  out: 1 of 1 documents kept",
    ]


def test_artefacts_are_reported_or_rejected(tmp_path):
    """The case of the escaped corpus: one document in twenty is nothing but backslashes."""
    records = [
        {"text": "\\" * 500 if n % 20 == 7 else f"An ordinary sentence, the {n}th of its kind."} for n in range(200)
    ]
    write_records(tmp_path / "a.jsonl", records)
    lines: list[str] = []
    summary = prepare([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", 0.0, report=lines.append)
    assert (summary.sources["out"].artefacts, summary.sources["out"].kept) == (10, 200)
    assert "  out: 10 of 200 (5.00%)" in lines
    assert any(line.startswith(f"  {tmp_path}/a.jsonl:8: escapes 1.00, repeats 1.00") for line in lines)
    listed = [json.loads(line) for line in (tmp_path / "out" / "artefacts.jsonl").read_text().splitlines()]
    assert [record["place"] for record in listed] == [f"{tmp_path}/a.jsonl:{n + 1}" for n in range(7, 200, 20)]
    summary = prepare([tmp_path / "a.jsonl"], tmp_path / "clean", "bytes", 0.0, artefacts="reject", report=silent)
    assert summary.sources["clean"].kept == 190
    assert not any("\\" in text for text in texts(TokenStore(tmp_path / "clean" / "train")))
    summary = prepare([tmp_path / "a.jsonl"], tmp_path / "blind", "bytes", 0.0, artefacts="off", report=silent)
    assert summary.sources["blind"].artefacts == 0
    assert not (tmp_path / "blind" / "artefacts.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"keep": "scoer"}, r"keep=scoer: no document has it"),
        ({"keep": "a/b"}, r"keep=a/b: must be a key of letters"),
        ({"filter": "scoer > 1"}, r"keep=scoer: no document has it"),
        ({"filter": "score"}, r"filter=score: must read KEY >= VALUE"),
        ({"keep": "text"}, r"keep=text: has more than 3 different texts"),
        ({"keep": "mixed"}, r"keep=mixed: is a number in some documents and a text in others"),
        ({"validation_from": "summer"}, r"validation_from=summer: must be a date"),
        ({"validation_from": "2022-07-01", "validation_fraction": 0.1}, "each says what goes to validation; give one"),
        ({"workers": 0}, r"workers=0: must be at least 1"),
    ],
)
def test_unusable_options_are_refused(tmp_path, dated, options, problem, monkeypatch):
    monkeypatch.setattr("lit_stable.data.columns.MOST_TEXTS", 3)
    write_records(tmp_path / "mixed.jsonl", [{"text": "a", "mixed": 1}])
    write_records(tmp_path / "other.jsonl", [{"text": "a", "mixed": "x"}])
    with pytest.raises(ValueError, match=problem):
        prepare([tmp_path / "*.jsonl"], tmp_path / "out", "bytes", report=silent, **options)


def test_compressed_files_tables_and_folders_give_one_store(tmp_path):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    write_records(tmp_path / "in" / "a.jsonl.gz", [{"text": "one", "score": 1}])
    parquet.write_table(pyarrow.table({"text": ["two"], "score": [2.5]}), tmp_path / "in" / "b.parquet")
    (tmp_path / "in" / "c.txt").write_text("three")
    prepare([tmp_path / "in"], tmp_path / "out", "bytes", 0.0, keep="score", report=silent)
    store = TokenStore(tmp_path / "out" / "train")
    assert texts(store) == ["one", "two", "three"]
    assert [store.values("score", 0, 3).value(row) for row in range(3)] == [1.0, 2.5, None]


def test_its_processes_begin_without_torch_and_lightning():
    """Each imports this anew: with them it took seven seconds and half a GiB."""
    code = "import sys, lit_stable.data.prepare; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "lit_stable.data.text.tokenising" in done.stdout.split()
    assert not {"torch", "lightning", "pytorch_lightning", "transformers"} & set(done.stdout.split())
