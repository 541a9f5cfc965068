from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from lit_stable.data.columns import Column, column_of
from lit_stable.data.store import TokenStore, token_dtype
from lit_stable.data.store_writer import TokenStoreWriter


def open_writer(path, **overrides):
    arguments = {"vocab_size": 257, "eot_id": 256, "tokenizer": "t.json", "tokenizer_sha256": "0", "split": "train"}
    return TokenStoreWriter(path, **(arguments | overrides))


def test_tokens_come_back_with_an_end_of_text_behind_each_document(make_store):
    store = make_store(documents=[[1, 2, 3], [], [4]])
    assert store.read(0, store.num_tokens).tolist() == [1, 2, 3, 256, 256, 4, 256]


def test_windows_overlap_by_the_label_of_the_last_input(make_store):
    store = make_store(documents=[[0, 1, 2, 3, 4, 5, 6, 7]])  # 9 tokens
    assert store.num_windows(4) == 2
    assert store.window(0, 4).tolist() == [0, 1, 2, 3, 4]
    assert store.window(1, 4).tolist() == [4, 5, 6, 7, 256]
    assert store.num_windows(8) == 1
    assert store.num_windows(9) == 0


def test_windows_outside_the_store_are_refused(make_store):
    store = make_store(num_tokens=100)
    for number in (-1, store.num_windows(10)):
        with pytest.raises(ValueError, match=f"window {number} is not among the 9 it holds"):
            store.window(number, 10)


def test_shards_are_invisible_to_readers(make_store):
    tokens = np.random.default_rng(0).integers(0, 256, 150_000)
    store = make_store(documents=[tokens])  # 32 768 tokens a shard
    assert len(list(store.path.glob("shard-*.bin"))) == 5
    assert np.array_equal(store.read(0, 150_000), tokens)
    assert np.array_equal(store.read(32_700, 32_900), tokens[32_700:32_900])
    assert np.array_equal(store.read(30_000, 140_000), tokens[30_000:140_000])


def test_documents_are_found_by_token_offset(tmp_path):
    with open_writer(tmp_path / "s") as writer:
        writer.add([1, 2], "news", date=20240229)  # tokens 0-2
        writer.add([3], "web")  # tokens 3-4
        writer.add([4, 5, 6], "news", date=19991231)  # tokens 5-8
    store = TokenStore(tmp_path / "s")
    assert store.sources == ["news", "web"]
    assert store.document_at(2) == (0, "news", 20240229)
    assert store.document_at(3) == (1, "web", 0)
    assert store.document_at(8) == (2, "news", 19991231)
    assert [place.number for place in store.documents_in(2, 6)] == [0, 1, 2]
    assert [place.number for place in store.documents_in(3, 5)] == [1]


def kept(path, documents):
    """A store of documents with a score and a language."""
    with open_writer(path, columns={"score": False, "lang": True}) as writer:
        for ids, score, lang in documents:
            sources = Column(np.zeros(1, dtype=np.int32), ["text"])
            values = {"score": column_of("score", [score]), "lang": column_of("lang", [lang])}
            writer.add_many(np.array([*ids, 256]), [len(ids) + 1], sources, [0], values)
    return TokenStore(path)


def test_kept_values_stand_beside_their_documents(tmp_path):
    documents = [([1, 2], 0.5, "de"), ([3], None, "en"), ([4, 5, 6], 2.0, None), ([], 1.0, "de")]
    store = pickle.loads(pickle.dumps(kept(tmp_path / "s", documents)))
    assert store.keys == ["date", "source", "score", "lang"]
    assert [store.values("score", 0, 4).value(row) for row in range(4)] == [0.5, None, 2.0, 1.0]
    assert [store.values("lang", 1, 4).value(row) for row in range(3)] == ["en", None, "de"]
    assert [store.values("source", 0, 4).value(row) for row in range(4)] == ["text"] * 4
    assert store.values("date", 0, 4).known.tolist() == [False] * 4
    assert store.document_at(4).number == 1  # of its values too
    assert (tmp_path / "s" / "column-score.bin").stat().st_size == 4 * 8


def test_a_column_that_no_document_fills_still_reads(tmp_path):
    store = kept(tmp_path / "s", [([1], None, None)])
    assert [store.values(key, 0, 1).value(0) for key in ("score", "lang")] == [None, None]


def test_many_documents_at_once_are_the_same_as_one_by_one(tmp_path):
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 256, draw.integers(0, 40_000)) for _ in range(12)]
    with open_writer(tmp_path / "one", shard_bytes=65_536) as writer:
        for number, ids in enumerate(documents):
            writer.add(ids, f"s{number * 5 % 3}", date=number)
    with open_writer(tmp_path / "many", shard_bytes=65_536) as writer:
        for start in (0, 5):
            batch = documents[start : start + 7 if start else 5]
            tokens = np.concatenate([np.append(ids, 256) for ids in batch])
            numbers = np.arange(start, start + len(batch))
            sources = Column((numbers * 5 % 3).astype(np.int32), ["s0", "s1", "s2"])
            writer.add_many(tokens, [len(ids) + 1 for ids in batch], sources, numbers)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "many" / file.name).read_bytes()


def test_a_store_says_the_oldest_format_that_holds_it_and_old_ones_open(tmp_path, make_store):
    plain = make_store()
    assert json.loads((plain.path / "index.json").read_text())["format"] == 1
    assert "columns" not in json.loads((plain.path / "index.json").read_text())
    assert plain.keys == ["date", "source"]
    store = kept(tmp_path / "s", [([1], 1.0, "de")])
    assert json.loads((store.path / "index.json").read_text())["format"] == 2


def test_a_damaged_or_missing_column_is_refused(tmp_path):
    path = kept(tmp_path / "s", [([1], 1.0, "de"), ([2], 2.0, "en")]).path
    content = (path / "column-score.bin").read_bytes()
    (path / "column-score.bin").write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match=r"column-score\.bin: does not match its checksum"):
        TokenStore(path).values("score", 0, 2)
    (path / "column-score.bin").write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"column-score\.bin: has 8 bytes where the index says 16"):
        TokenStore(path)


def test_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path):
    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")
    with open_writer(tmp_path / "s", vocab_size=100_000, eot_id=99_999) as writer:
        writer.add([70_000], "text")
    assert TokenStore(tmp_path / "s").read(0, 2).tolist() == [70_000, 99_999]


def test_a_store_travels_to_workers_by_its_path(make_store):
    store = make_store(num_tokens=50_000)
    store.read(0, 50_000)
    content = pickle.dumps(store)
    assert len(content) < 1000
    assert np.array_equal(pickle.loads(content).read(0, 50_000), store.read(0, 50_000))


@pytest.mark.parametrize("ids", [[0, 257], [-1]])
def test_ids_out_of_vocabulary_are_refused(tmp_path, ids):
    with (
        pytest.raises(ValueError, match=r"token ids -?[0-9]+ to [0-9-]+ must be from 0 to 256"),
        open_writer(tmp_path / "s") as writer,
    ):
        writer.add(ids, "text")
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_documents_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no document was written"), open_writer(tmp_path / "s"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 65_535])
def test_shards_hold_whole_checksummed_chunks(tmp_path, size):
    with pytest.raises(ValueError, match=f"shard_bytes={size}: must be a positive multiple of 65536"):
        open_writer(tmp_path / "s", shard_bytes=size)


def test_a_damaged_byte_is_refused_on_first_touch_and_not_before(make_store):
    store = make_store(num_tokens=100_000)
    shard = store.path / "shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[1234] ^= 1
    shard.write_bytes(content)
    store = TokenStore(store.path)
    store.read(0, 32_768)
    with pytest.raises(ValueError, match=r"shard-00001\.bin: bytes from 0 on do not match their checksum"):
        store.read(32_767, 32_769)


def test_a_truncated_shard_is_refused_at_open(make_store):
    path = make_store(num_tokens=1000).path
    shard = path / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"shard-00000\.bin: has 1998 bytes where the index says 2000"):
        TokenStore(path)


def test_a_shard_that_is_cut_during_the_run_is_refused(make_store):
    store = make_store(num_tokens=1000)
    store.read(0, 10)
    (store.path / "shard-00000.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"shard-00000\.bin: was cut while in use"):
        store.read(0, 10)


def test_many_shards_do_not_exhaust_the_open_files(make_store, monkeypatch):
    monkeypatch.setattr("lit_stable.data.store.MAX_OPEN_FILES", 2)
    store = make_store(num_tokens=150_000)
    for start in (0, 140_000, 70_000, 0, 100_000):
        assert store.read(start, start + 1).tolist() == [start % 250]


@pytest.mark.parametrize("name", ["shard-00000.bin", "documents.bin", "checksums.bin"])
def test_a_missing_file_is_refused_at_open(make_store, name):
    path = make_store().path
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: is missing"):
        TokenStore(path)


def test_damaged_checksums_are_refused_at_open(make_store):
    path = make_store().path
    (path / "checksums.bin").write_bytes(b"\0\0\0\0")
    with pytest.raises(ValueError, match=r"checksums\.bin: does not match the index"):
        TokenStore(path)


def test_damaged_document_records_are_refused(make_store):
    path = make_store().path
    (path / "documents.bin").write_bytes(b"\1" * 16)
    with pytest.raises(ValueError, match=r"documents\.bin: does not match its checksum"):
        TokenStore(path).document_at(0)


def test_a_folder_without_index_is_no_store(tmp_path):
    with pytest.raises(ValueError, match=r"is not a token store \(no index\.json\)"):
        TokenStore(tmp_path)


def test_a_damaged_index_is_refused(make_store):
    path = make_store().path
    (path / "index.json").write_text('{"format": 1,')
    with pytest.raises(ValueError, match=r"index\.json: is damaged"):
        TokenStore(path)


def test_an_index_that_lacks_something_is_damaged(make_store):
    path = make_store().path
    index = json.loads((path / "index.json").read_text())
    del index["num_documents"]
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json: is damaged \(it lacks num_documents\); prepare"):
        TokenStore(path)


def test_a_newer_format_is_refused(make_store):
    path = make_store().path
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps(index | {"format": 3}))
    with pytest.raises(ValueError, match="has format 3, this version reads up to 2; upgrade lit-stable"):
        TokenStore(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"dtype": "<u2"}'])
def test_an_index_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: is not the index of a token store; prepare the data again"):
        TokenStore(tmp_path)
