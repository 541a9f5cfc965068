from __future__ import annotations

import pytest

from lit_stable.data.text.documents import Fields
from lit_stable.data.text.inputs import plan_pieces

FIELDS = Fields("s")


def files_of(pieces):
    return [[file.rsplit("/", 1)[1] for file in piece.files] for piece in pieces]


def test_files_come_sorted_each_once_and_small_texts_share_a_piece(tmp_path):
    for name in ("d.txt", "a.md", "b.jsonl", "c.txt", "e.txt"):
        (tmp_path / name).write_text("x" * 10)
    pieces = plan_pieces([tmp_path / "*", tmp_path / "a.md"], FIELDS, piece_bytes=20)
    assert [piece.kind for piece in pieces] == ["text", "lines", "text", "text"]
    assert files_of(pieces) == [["a.md"], ["b.jsonl"], ["c.txt", "d.txt"], ["e.txt"]]
    assert [piece.size for piece in pieces] == [10, 10, 20, 10]


def test_a_folder_gives_all_its_files_but_hidden_ones(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / ".git").mkdir()
    for name in ("b.py", "deep/a.txt", ".hidden", ".git/config"):
        (tmp_path / "in" / name).write_text("x")
    assert files_of(plan_pieces([tmp_path / "in"], FIELDS)) == [["b.py", "a.txt"]]


def test_patterns_descend_and_a_name_with_pattern_characters_is_a_file_first(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("sub/deep/a.txt", "a[1].txt"):
        (tmp_path / name).write_text("x")
    assert files_of(plan_pieces([tmp_path / "**" / "*.txt"], FIELDS)) == [["a[1].txt", "a.txt"]]
    assert files_of(plan_pieces([tmp_path / "a[1].txt"], FIELDS)) == [["a[1].txt"]]


def test_lines_are_cut_by_bytes_unless_compressed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * 25)
    (tmp_path / "b.json.gz").write_bytes(b"x" * 25)
    pieces = plan_pieces([tmp_path / "*"], FIELDS, piece_bytes=10)
    assert [(piece.kind, piece.start, piece.stop, piece.size) for piece in pieces] == [
        ("lines", 0, 10, 10),
        ("lines", 10, 20, 10),
        ("lines", 20, 25, 5),
        ("lines", 0, None, 25),
    ]


def test_a_changed_file_gives_another_piece(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    before = plan_pieces([tmp_path / "a.txt"], FIELDS)
    assert plan_pieces([tmp_path / "a.txt"], FIELDS) == before
    (tmp_path / "a.txt").write_text("yy")
    assert plan_pieces([tmp_path / "a.txt"], FIELDS) != before


def test_inputs_that_match_nothing_are_all_told(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"input gone\.txt, no/\*\.md: matches no file"):
        plan_pieces(["gone.txt", tmp_path / "a.txt", "no/*.md"], FIELDS)
    with pytest.raises(ValueError, match=r"input \(none\): matches no file"):
        plan_pieces([], FIELDS)
