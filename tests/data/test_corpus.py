from __future__ import annotations

from pathlib import Path

import pytest

from lit_stable.data import corpus as corpus_module
from lit_stable.data.corpus import (
    PythonStandardLibrary,
    builtin_folder,
    cache_folder,
    ensure_builtin,
)
from lit_stable.data.store import TokenStore
from lit_stable.data.tokenizer import make_tokenizer


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A library of 200 files in the place of the interpreter's own."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(200):
        (folder / f"module_{number:03}.py").write_text(f"value = {number}\n" * 20)
    monkeypatch.setitem(corpus_module.BUILTIN, "python-stdlib", lambda: PythonStandardLibrary(folder))
    return folder


def test_the_interpreter_brings_megabytes_of_source():
    fingerprint = PythonStandardLibrary().fingerprint()
    assert fingerprint.num_files > 300
    assert 5e6 < fingerprint.num_bytes < 30e6


def test_only_the_librarys_own_files_are_read_in_sorted_order(tmp_path):
    names = ["b.py", "a/z.py", "test/x.py", "a/tests/x.py", "site-packages/p.py", "a.txt", "_sysconfigdata_linux.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [name for name, _ in PythonStandardLibrary(tmp_path).files()] == ["a/z.py", "b.py"]


def test_coding_lines_are_honoured(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    assert [text for _, text in PythonStandardLibrary(tmp_path).files()] == ["# coding: latin-1\n# é\n"]


def test_fingerprint_follows_names_and_texts(tmp_path):
    (tmp_path / "a.py").write_text("x")
    first = PythonStandardLibrary(tmp_path).fingerprint()
    assert (first.num_files, first.num_bytes) == (1, 1)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = PythonStandardLibrary(tmp_path).fingerprint()
    (tmp_path / "b.py").write_text("y")
    assert len({first.sha256, renamed.sha256, PythonStandardLibrary(tmp_path).fingerprint().sha256}) == 3


def test_a_library_without_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no Python source; give data\.sources a prepared folder"):
        list(PythonStandardLibrary(tmp_path))


def test_an_unknown_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="builtin:shakespeare: no such corpus; there is python-stdlib"):
        ensure_builtin("shakespeare", "bytes", tmp_path)


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_STABLE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("LIT_STABLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "lit-stable"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "lit-stable"


def test_the_first_use_tokenises_and_the_second_finds_it(tmp_path, small_library):
    lines: list[str] = []
    folder = ensure_builtin("python-stdlib", "bpe:300", tmp_path / "cache", lines.append)
    assert folder == builtin_folder("python-stdlib", "bpe:300", tmp_path / "cache")
    assert TokenStore(folder / "train").num_documents + TokenStore(folder / "validation").num_documents == 200
    assert "200 files" in lines[0]
    assert "sha256" in lines[0]
    again: list[str] = []
    assert ensure_builtin("python-stdlib", "bpe:300", tmp_path / "cache", again.append) == folder
    assert len(again) == 1
    assert "tokenised before" in again[0]


def test_another_text_or_tokenizer_goes_to_another_folder(tmp_path, small_library):
    make_tokenizer("bytes", []).save(tmp_path / "t.json")
    folders = {
        builtin_folder("python-stdlib", spec, tmp_path) for spec in ("bytes", "bpe:300", str(tmp_path / "t.json"))
    }
    (small_library / "more.py").write_text("x = 1")
    folders.add(builtin_folder("python-stdlib", "bytes", tmp_path))
    assert len(folders) == 4
    assert all(folder.parent == tmp_path for folder in folders)


def test_a_folder_that_another_process_wrote_meanwhile_is_used(tmp_path, small_library, monkeypatch):
    write = corpus_module.prepare_documents

    def write_after_another(*arguments):
        write(*arguments)
        write(*arguments)

    monkeypatch.setattr(corpus_module, "prepare_documents", write_after_another)
    lines: list[str] = []
    folder = ensure_builtin("python-stdlib", "bytes", tmp_path / "cache", lines.append)
    assert "another process tokenised it first" in lines[-1]
    assert TokenStore(folder / "train").num_documents > 100
