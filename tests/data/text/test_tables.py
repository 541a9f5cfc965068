from __future__ import annotations

import sys

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from lit_stable.data.text.documents import Document, Fields
from lit_stable.data.text.inputs import DATASET_ROWS, plan_pieces
from lit_stable.data.text.readers import describe, read_piece

RECORDS = {
    "text": [f"text {number}" for number in range(10)],
    "date": [f"2020-01-{number + 1:02d}" for number in range(10)],
    "meta": [{"score": number / 10, "url": "x"} for number in range(10)],
    "image": [b"not wanted"] * 10,
}
FIELDS = Fields("s", keep=("meta.score",))
EXPECTED = [Document(f"text {n}", "s", 20200101 + n, (n / 10,)) for n in range(10)]


def read(inputs, fields=FIELDS, piece_bytes=1 << 30):
    return [step.row for piece in plan_pieces(inputs, fields, piece_bytes) for step in read_piece(piece, fields)]


@pytest.fixture
def table(tmp_path):
    parquet.write_table(pyarrow.table(RECORDS), tmp_path / "a.parquet", row_group_size=4)
    return tmp_path / "a.parquet"


@pytest.fixture
def saved(tmp_path):
    datasets.Dataset.from_dict(RECORDS).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_parquet_file_gives_its_rows_with_nested_values(table):
    assert [row.document for row in read([table])] == EXPECTED
    assert describe(read([table])[7].place) == f"{table}[7]"


def test_row_groups_are_shared_out(table):
    pieces = plan_pieces([table], FIELDS, piece_bytes=1)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 1), (1, 2), (2, 3)]
    assert sum(piece.size for piece in pieces) == pytest.approx(table.stat().st_size, abs=3)
    assert [row.document for row in read([table], piece_bytes=1)] == EXPECTED
    assert [row.place.number for row in read([table], piece_bytes=1)] == list(range(10))


def test_a_saved_data_set_is_known_by_its_folder_or_its_name(saved):
    for name in (saved, f"hf:{saved}", f"hf:{saved}@train"):
        assert [row.document for row in read([name])] == EXPECTED


def test_rows_of_a_data_set_are_shared_out(saved, monkeypatch):
    monkeypatch.setattr("lit_stable.data.text.inputs.DATASET_ROWS", 3)
    assert [(piece.start, piece.stop) for piece in plan_pieces([saved], FIELDS)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [row.document for row in read([saved])] == EXPECTED
    assert DATASET_ROWS > 1000


def test_a_saved_dictionary_of_splits_gives_the_named_one(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "splits")
    assert [row.document.text for row in read([tmp_path / "splits"])] == ["train"]
    assert [row.document.text for row in read([f"hf:{tmp_path}/splits@test"])] == ["test"]
    with pytest.raises(ValueError, match=r"has no split dev; write @SPLIT behind it, with one of train, test"):
        read([f"hf:{tmp_path}/splits@dev"])


def test_a_data_set_by_name_is_loaded_with_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("hf:org/name1", "hf:org/name1:en@test[:1%]"):
        assert [row.document.text for row in read([name])] == ["a"]
    assert asked == [("org/name1", None, "train"), ("org/name1", "en", "test[:1%]")]


def test_a_data_set_that_cannot_be_had_is_refused(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"hf:org/name2: cannot be loaded \(no network here\)"):
        plan_pieces(["hf:org/name2"], FIELDS)
    with pytest.raises(ValueError, match=r"hf:: must read hf:NAME"):
        plan_pieces(["hf:"], FIELDS)


def test_a_table_without_the_text_names_what_it_has(table, saved):
    for name in (table, saved):
        with pytest.raises(ValueError, match=r"has no column body; set text_key to one of text, date, meta, image"):
            plan_pieces([name], Fields("s", text_key="body"))


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"oops")
    with pytest.raises(ValueError, match=r"a\.parquet: is no Parquet file, or is damaged"):
        plan_pieces([tmp_path / "a.parquet"], FIELDS)


@pytest.mark.parametrize(
    ("package", "name", "extra"), [("pyarrow", "a.parquet", "data"), ("datasets", "hf:org/name3", "datasets")]
)
def test_missing_packages_are_named(tmp_path, monkeypatch, package, name, extra):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"needs the package {package}; pip install 'lit-stable\[{extra}\]'"):
        plan_pieces([name if name.startswith("hf:") else tmp_path / name], FIELDS)
