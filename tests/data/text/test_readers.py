from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_stable.data.text import readers
from lit_stable.data.text.documents import Document, Fields
from lit_stable.data.text.inputs import plan_pieces
from lit_stable.data.text.readers import START, describe, read_piece

FIELDS = Fields("s")


def read(inputs, fields=FIELDS, piece_bytes=1 << 30):
    return [step.row for piece in plan_pieces(inputs, fields, piece_bytes) for step in read_piece(piece, fields)]


def texts(rows):
    return [row.document.text for row in rows]


def test_a_text_file_is_a_document_with_its_bytes_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n")
    (tmp_path / "b.txt").write_bytes("zwölf".encode())
    assert [row.document for row in read([tmp_path])] == [Document("one\r\n", "s"), Document("zwölf", "s")]


@given(
    text=st.text(alphabet="a\n-é", max_size=60),
    separator=st.sampled_from(["\n", "\n\n", "--", "a\n", "é"]),
    block=st.integers(1, 7),
)
@settings(deadline=None, max_examples=150)
def test_a_separator_cuts_a_file_as_python_does_whatever_the_blocks(tmp_path_factory, text, separator, block):
    path = tmp_path_factory.mktemp("x") / "a.txt"
    path.write_bytes(text.encode())
    before, readers._BLOCK = readers._BLOCK, block
    try:
        rows = read([path], Fields("s", separator))
    finally:
        readers._BLOCK = before
    assert texts(rows) == text.split(separator)


@given(lengths=st.lists(st.integers(0, 30), max_size=12), piece=st.integers(1, 60), end=st.booleans())
@settings(deadline=None, max_examples=150)
def test_pieces_of_a_file_of_lines_hold_each_line_once(tmp_path_factory, lengths, piece, end):
    path = tmp_path_factory.mktemp("x") / "a.jsonl"
    lines = [json.dumps({"text": "x" * length}) for length in lengths]
    path.write_text("\n".join(lines) + "\n" * end)
    rows = read([path], piece_bytes=piece)
    assert [len(text) for text in texts(rows)] == lengths
    assert [describe(row.place) for row in rows] == [f"{path}:{number + 1}" for number in range(len(lengths))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz", "a.parquet"])
def test_reading_goes_on_behind_any_document(tmp_path, name):
    path = tmp_path / name
    fields = Fields("s", "\n", keep=("n",))
    lines = "\n".join(json.dumps({"text": f"text {number}", "n": number}) for number in range(20)).encode()
    if name.endswith("parquet"):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": [f"text {n}" for n in range(20)], "n": list(range(20))})
        parquet.write_table(table, path, row_group_size=6)
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    (piece,) = plan_pieces([path], fields)
    steps = list(read_piece(piece, fields))
    assert len(steps) == 20
    assert steps[-1].raw == (0 if name.endswith("parquet") else path.stat().st_size)
    for number, step in enumerate(steps[:-1]):
        rest = list(read_piece(piece, fields, step.cursor))
        assert [(s.row, s.cursor) for s in rest] == [(s.row, s.cursor) for s in steps[number + 1 :]]


def test_reading_goes_on_behind_a_whole_file_of_several(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    (piece,) = plan_pieces([tmp_path], FIELDS)
    steps = list(read_piece(piece, FIELDS))
    assert [step.raw for step in steps] == [1, 2, 3]
    assert texts(step.row for step in read_piece(piece, FIELDS, steps[1].cursor)) == ["c"]
    assert list(read_piece(piece, FIELDS, steps[2].cursor)) == []
    assert [step.row for step in read_piece(piece, FIELDS, START)] == [step.row for step in steps]


def test_bad_documents_are_told_with_their_place_and_others_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n{\n{"text": 3}\n{"text": "good"}')
    (tmp_path / "b.txt").write_bytes(b"ab\xff")
    rows = read([tmp_path])
    assert texts(row for row in rows if row.document) == ["good", "good"]
    assert [f"{describe(row.place)}: {row.problem}" for row in rows if row.document is None] == [
        f"{tmp_path}/a.jsonl:3: Expecting property name enclosed in double quotes: line 2 column 1 (char 2)",
        f'{tmp_path}/a.jsonl:4: must be an object with a string "text"',
        f"{tmp_path}/b.txt: is not UTF-8 text (invalid start byte at byte 2)",
    ]


def test_a_bad_stretch_of_a_separated_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one--\xff--three")
    rows = read([tmp_path / "a.txt"], Fields("s", "--"))
    assert [row.document and row.document.text for row in rows] == ["one", None, "three"]
    assert describe(rows[1].place) == f"{tmp_path}/a.txt[1]"


def test_lines_before_a_place_may_be_known_already(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3)
    place = read([tmp_path / "a.jsonl"], piece_bytes=14)[2].place
    assert describe(place) == describe(place, lines_before=2) == f"{tmp_path}/a.jsonl:3"
