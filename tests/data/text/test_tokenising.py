from __future__ import annotations

import dataclasses
import json

import pytest

from lit_stable.data.text import tokenising
from lit_stable.data.text.artefacts import ArtefactLimits
from lit_stable.data.text.documents import Fields
from lit_stable.data.text.inputs import plan_pieces
from lit_stable.data.text.parts import Part, finished_parts
from lit_stable.data.text.tokenising import Advance, PieceWorker, Tokenising
from lit_stable.data.tokenizer import make_tokenizer


@pytest.fixture
def how(tmp_path):
    sha256 = make_tokenizer("bytes", []).save(tmp_path / "tokenizer.json")
    (tmp_path / "parts").mkdir()
    return Tokenising(tmp_path / "parts", tmp_path / "tokenizer.json", sha256, Fields("s"), ArtefactLimits())


@pytest.fixture
def piece(tmp_path):
    lines = [json.dumps({"text": f"text {number:02d}"}) for number in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:10], "oops", '{"text": " "}', *lines[10:]]))
    (piece,) = plan_pieces([tmp_path / "a.jsonl"], Fields("s"))
    return piece


def text_of(tables) -> str:
    tokens = [token for table in tables for token in Part(table, ()).tokens().tolist()]
    return bytes(10 if token == 256 else token for token in tokens).decode()


def test_a_piece_becomes_parts_that_hold_it_all(how, piece, monkeypatch):
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 15)
    news: list[Advance] = []
    PieceWorker(how, part_bytes=30)(piece, news.append)
    tables = finished_parts(how.folder, how.key(piece))
    parts = [Part(table, ()) for table in tables]
    assert [part.num_documents for part in parts] == [6, 5, 6, 3]
    assert [part.summary.last for part in parts] == [False, False, False, True]
    assert text_of(tables) == "".join(f"text {number:02d}\n" for number in range(20))
    assert sum(part.summary.num_bad for part in parts) == sum(part.summary.num_empty for part in parts) == 1
    assert [sum(column) for column in zip(*news, strict=True)] == [piece.size, 140, 20, 160]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_what_is_there_is_not_done_again(how, piece, monkeypatch, kept):
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 15)
    PieceWorker(how, part_bytes=30)(piece, lambda news: None)
    tables = finished_parts(how.folder, how.key(piece))
    whole = text_of(tables)
    for table in tables[kept:]:
        table.unlink()
    times = [table.stat().st_mtime_ns for table in tables[:kept]]
    news: list[Advance] = []
    PieceWorker(how, part_bytes=30)(piece, news.append)
    assert text_of(finished_parts(how.folder, how.key(piece))) == whole
    assert [table.stat().st_mtime_ns for table in tables[:kept]] == times
    assert sum(step.num_documents for step in news) == [14, 9, 3][kept - 1]
    PieceWorker(how, part_bytes=30)(piece, lambda news: pytest.fail("there is nothing left to do"))


def test_whatever_a_part_depends_on_is_in_its_name(how, piece):
    others = [
        dataclasses.replace(how, tokenizer_sha256="other"),
        dataclasses.replace(how, fields=Fields("s", keep=("score",))),
        dataclasses.replace(how, limits=None),
        dataclasses.replace(how, limits=ArtefactLimits(escapes=0.2)),
    ]
    keys = [other.key(piece) for other in [how, *others]] + [how.key(dataclasses.replace(piece, stamp=(1, 2)))]
    assert len(set(keys)) == 6
    assert dataclasses.replace(how, strict=True, folder=how.folder / "x").key(piece) == how.key(piece)


def test_strict_stops_at_the_first_document_that_cannot_be_read(how, piece):
    strict = dataclasses.replace(how, strict=True)
    with pytest.raises(ValueError, match=r"a\.jsonl:11: Expecting value.*; correct it, or leave out --strict"):
        PieceWorker(strict)(piece, lambda news: None)
    assert finished_parts(how.folder, how.key(piece)) == []


def test_nothing_is_measured_without_limits(how, tmp_path):
    (tmp_path / "b.txt").write_text("\\" * 100)
    (piece,) = plan_pieces([tmp_path / "b.txt"], Fields("s"))
    for each, flagged in ((how, True), (dataclasses.replace(how, limits=None), False)):
        PieceWorker(each)(piece, lambda news: None)
        assert Part(finished_parts(how.folder, each.key(piece))[0], ()).flagged.tolist() == [flagged]
