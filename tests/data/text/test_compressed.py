from __future__ import annotations

import gzip

import pytest
import zstandard

from lit_stable.data.text.compressed import is_compressed, open_bytes, plain_suffix

CONTENT = b"".join(b"line %d\n" % number for number in range(200_000))  # 2.2 MB, several blocks


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


@pytest.fixture(params=["a.txt", "a.txt.gz", "a.txt.zst"])
def path(request, tmp_path):
    write = {".txt": bytes, ".gz": gzip.compress, ".zst": zstd}
    path = tmp_path / request.param
    path.write_bytes(write[path.suffix](CONTENT))
    return path


def test_the_content_is_the_same_whatever_the_compression(path):
    with open_bytes(path) as content:
        assert content.stream.read() == CONTENT
        assert content.raw.tell() == path.stat().st_size
    assert plain_suffix(path) == ".txt"
    assert is_compressed(path) == (path.suffix != ".txt")


@pytest.mark.parametrize("offset", [0, 5, 1_500_000, len(CONTENT), len(CONTENT) + 9])
def test_reading_goes_on_at_any_byte(path, offset):
    with open_bytes(path) as content:
        content.skip(offset)
        assert content.stream.read() == CONTENT[offset:]


def test_frames_and_members_follow_each_other(tmp_path):
    for name, compress in (("a.gz", gzip.compress), ("a.zst", zstd)):
        (tmp_path / name).write_bytes(compress(b"one") + compress(b"two"))
        with open_bytes(tmp_path / name) as content:
            assert content.stream.read() == b"onetwo"


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damage_is_told_with_the_file_and_never_taken_for_the_end(tmp_path, suffix, damage):
    whole = gzip.compress(CONTENT) if suffix == "gz" else zstd(CONTENT)
    half = len(whole) // 2
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(whole[:half] if damage == "cut" else b"oops" + whole)
    with pytest.raises(ValueError, match=rf"a\.{suffix}: is cut short or damaged"), open_bytes(path) as content:
        content.stream.read()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(b"")
    with pytest.raises(ValueError, match=r"needs the package zstandard; pip install 'lit-stable\[data\]'"):
        open_bytes(tmp_path / "a.zst").__enter__()
