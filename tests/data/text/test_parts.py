from __future__ import annotations

import numpy as np

from lit_stable.data.text.artefacts import Measures
from lit_stable.data.text.documents import Document, Place
from lit_stable.data.text.parts import (
    BAD_SHOWN,
    BadRow,
    Part,
    PartWriter,
    finished_parts,
    is_finished,
    part_path,
    remove_others,
    remove_scratch,
)

KEEP = ("score", "lang")
MEASURES = Measures(1.0, 0.5, 0.25, 20.0)


def write(path, documents: int = 2, last: bool = True) -> None:
    writer = PartWriter(path, KEEP, vocab_size=257, eot_id=256, file="a.jsonl")
    for number in range(documents):
        flagged = (Place("a.jsonl", "line", 2), MEASURES) if number == 1 else None
        document = Document(f"text {number}", f"s{number}", 20200101 + number, (float(number), None))
        writer.add(document, np.arange(number + 1), bytes(range(32)), flagged)
    for number in range(BAD_SHOWN + 5):
        writer.add_bad(BadRow(Place("a.jsonl", "line", number), "oops"))
    writer.finish((0, 7, 9), last)


def test_a_part_reads_back_as_it_was_written(tmp_path):
    write(tmp_path / "k-0000.npz")
    part = Part(tmp_path / "k-0000.npz", KEEP)
    assert part.tokens().tolist() == [0, 256, 0, 1, 256]
    assert part.tokens().dtype == np.uint16
    assert part.lengths.tolist() == [2, 3]
    assert part.digests.tolist() == [list(range(16))] * 2
    assert part.dates.tolist() == [20200101, 20200102]
    assert part.flagged.tolist() == [False, True]
    assert [part.sources.value(row) for row in range(2)] == ["s0", "s1"]
    assert [part.kept["score"].value(row) for row in range(2)] == [0.0, 1.0]
    assert part.kept["lang"] is None
    assert (part.summary.cursor, part.summary.file, part.summary.last) == ((0, 7, 9), "a.jsonl", True)
    assert part.summary.num_bad == BAD_SHOWN + 5
    assert part.summary.bad == [BadRow(Place("a.jsonl", "line", number), "oops") for number in range(BAD_SHOWN)]
    assert part.summary.artefacts == [(1, Place("a.jsonl", "line", 2), MEASURES, "text 1")]


def test_a_part_without_documents_is_one_too(tmp_path):
    write(tmp_path / "k-0000.npz", documents=0)
    part = Part(tmp_path / "k-0000.npz", KEEP)
    assert (part.num_documents, part.tokens().size, part.sources.texts) == (0, 0, [])


def test_nothing_is_there_before_the_end_and_scratch_is_removed(tmp_path):
    writer = PartWriter(tmp_path / "k-0000.npz", KEEP, 257, 256)
    writer.add(Document("a", "s", 0, (None, None)), np.arange(3), bytes(32), None)
    assert finished_parts(tmp_path, "k") == []
    (tmp_path / "k-0000.tokens").write_bytes(b"tokens without the table that vouches for them")
    assert finished_parts(tmp_path, "k") == []
    remove_scratch(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["k-0000.tokens"]


def test_a_piece_is_finished_when_its_last_part_says_so(tmp_path):
    assert not is_finished(tmp_path, "k")
    write(part_path(tmp_path, "k", 0), last=False)
    write(part_path(tmp_path, "k", 2))
    assert finished_parts(tmp_path, "k") == [tmp_path / "k-0000.npz"]  # the third does not follow
    assert not is_finished(tmp_path, "k")
    write(part_path(tmp_path, "k", 1), last=False)
    assert len(finished_parts(tmp_path, "k")) == 3
    assert is_finished(tmp_path, "k")


def test_parts_of_other_pieces_are_removed(tmp_path):
    write(part_path(tmp_path, "old", 0))
    write(part_path(tmp_path, "new", 0))
    remove_others(tmp_path, ["new"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new-0000.npz", "new-0000.tokens"]
