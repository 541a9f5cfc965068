from __future__ import annotations

import json
import os
import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from lit_stable.callbacks import checkpoint_files as files
from lit_stable.callbacks.newest_checkpoint import newest_usable


def write_file(path: Path, value: float = 1.0) -> Path:
    torch.save({"weights": torch.full((50,), value), "step": 3}, path)
    return path


def write_folder(path: Path, value: bytes = b"a") -> Path:
    (path / "nested").mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(value * 100)
    (path / "nested" / "meta.pt").write_bytes(value * 7)
    (path / ".metadata").write_bytes(value)
    files.write_checksums(path, {str(p.relative_to(path)): files.checksum(p) for p in files.shard_files(path)})
    return path


def test_checksum_is_the_size_and_the_crc32(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123456789")
    assert files.checksum(tmp_path / "a") == (9, 0xCBF43926)  # the check value of CRC-32
    (tmp_path / "empty").touch()
    assert files.checksum(tmp_path / "empty") == (0, 0)


def test_checksum_of_a_file_of_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 4)
    (tmp_path / "a").write_bytes(b"123456789")
    assert files.checksum(tmp_path / "a") == (9, zlib.crc32(b"123456789"))


def test_shard_files_leave_out_the_list_itself(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a.ckpt")
    assert [str(p.relative_to(folder)) for p in files.shard_files(folder)] == [
        ".metadata",
        "__0_0.distcp",
        "nested/meta.pt",
    ]


def test_whole_checkpoints_have_no_damage(tmp_path: Path) -> None:
    assert files.damage(write_file(tmp_path / "a.ckpt")) is None
    assert files.damage(write_folder(tmp_path / "b.ckpt")) is None


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    assert files.damage(tmp_path / "a.ckpt") == f"{tmp_path / 'a.ckpt'} does not exist"


def test_a_truncated_or_empty_file_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.ckpt")
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 1, 10, 0):
        path.write_bytes(whole[:length])
        assert (files.damage(path) or "").startswith(f"{path} is no complete checkpoint file (")


def test_a_zip_file_of_something_else_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert (
        files.damage(tmp_path / "a.ckpt") == f"{tmp_path / 'a.ckpt'} is no checkpoint: a zip file, and not one of torch"
    )


def test_a_flipped_bit_in_the_weights_is_found_and_torch_alone_would_not(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.ckpt")
    content = bytearray(path.read_bytes())
    at = bytes(content).index(torch.full((50,), 1.0).numpy().tobytes()) + 13
    content[at] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path)["weights"], torch.full((50,), 1.0))
    assert (files.damage(path) or "").startswith(f"{path} is damaged: its record a/data/0 does not match")


def test_any_flipped_byte_is_told_in_a_phrase_or_harms_nothing(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.ckpt")
    whole, expected = path.read_bytes(), torch.load(path)
    generator = random.Random(0)
    found = 0
    for at in generator.sample(range(len(whole)), 1000):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << generator.randrange(8))]) + whole[at + 1 :])
        if files.damage(path) is not None:
            found += 1
            continue
        try:
            loaded = torch.load(path)
        except RuntimeError:  # a header that torch reads and Python does not: torch refuses in words of its own
            continue
        assert torch.equal(loaded["weights"], expected["weights"]), at
    assert found > 100


def test_damage_in_a_folder_names_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a.ckpt")
    shard = folder / "__0_0.distcp"
    shard.write_bytes(b"a" * 99 + b"b")
    assert files.damage(folder) == f"{shard} is damaged: it does not match its checksum"
    shard.write_bytes(b"a" * 99)
    assert files.damage(folder) == f"{shard} is damaged: it does not match its checksum"
    shard.unlink()
    assert files.damage(folder) == f"{shard} is missing"


@pytest.mark.parametrize("content", [b"", b'{"__0_0.distcp": [100, 1', b"\xff\xfe"])
def test_a_damaged_list_of_checksums_is_named(content: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a.ckpt")
    (folder / files.CHECKSUMS).write_bytes(content)
    assert (files.damage(folder) or "").startswith(f"{folder / files.CHECKSUMS} is damaged (")


def test_a_folder_without_checksums_is_believed_if_it_has_metadata(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a.ckpt")
    (folder / files.CHECKSUMS).unlink()
    assert files.damage(folder) is None
    (folder / ".metadata").unlink()
    assert files.damage(folder) == f"{folder} is no checkpoint: it holds no .metadata file"


def test_parts_share_the_reading_and_miss_no_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a.ckpt")
    for shard in files.shard_files(folder):
        whole = shard.read_bytes()
        shard.write_bytes(b"x")
        assert sum(files.damage(folder, part, 2) is not None for part in (0, 1)) == 1
        shard.write_bytes(whole)
    (tmp_path / "b.ckpt").write_bytes(b"x")
    assert files.damage(tmp_path / "b.ckpt", part=1, parts=2) is None  # a file is read by the first only


@pytest.mark.parametrize("write", [write_file, write_folder])
@pytest.mark.parametrize("write_old", [None, write_file, write_folder])
def test_publish_replaces_what_was_there_and_leaves_nothing_beside_it(write, write_old, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.ckpt"
    if write_old:
        write_old(path)
    write(files.partial_path(path))
    files.publish(path)
    assert files.damage(path) is None
    assert path.is_dir() == (write is write_folder)
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_a_publish_killed_at_any_moment_leaves_a_whole_checkpoint(write, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Kill before each rename and before the last deletion in turn, then recover as a load does."""

    class Killed(BaseException):
        pass

    kills = 0
    for survived in range(10):
        folder = tmp_path / str(survived)
        folder.mkdir()
        path = write(folder / "a.ckpt")
        write(files.partial_path(path))
        left = survived

        def count_down() -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1

        with monkeypatch.context() as patch:
            for cls, name in ((Path, "rename"), (Path, "replace"), (files, "remove")):
                real = getattr(cls, name)
                patch.setattr(cls, name, lambda *a, real=real: (count_down(), real(*a))[1])
            try:
                files.publish(path)
            except Killed:
                kills += 1
            else:
                break
        files.recover(path)
        assert files.damage(path) is None
        files.recover(path)  # twice is once
        assert files.damage(path) is None
    assert kills >= 2


def test_remove_takes_files_and_folders_and_what_is_not_there(tmp_path: Path) -> None:
    for path in (write_file(tmp_path / "a"), write_folder(tmp_path / "b"), tmp_path / "c"):
        files.remove(path)
    assert os.listdir(tmp_path) == []


def test_size_on_disk_sums_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    assert files.size_on_disk(folder) == 100 + 7 + 1 + (folder / files.CHECKSUMS).stat().st_size
    assert json.loads((folder / files.CHECKSUMS).read_text())["nested/meta.pt"] == [7, zlib.crc32(b"a" * 7)]
    file = write_file(tmp_path / "b")
    assert files.size_on_disk(file) == len(file.read_bytes())


def test_the_newest_usable_is_whole_and_another(tmp_path: Path) -> None:
    for age, name in enumerate(["newest.ckpt", "damaged.ckpt", "usable.ckpt", "older.ckpt"]):
        path = write_file(tmp_path / name)
        if name == "damaged.ckpt":
            path.write_bytes(path.read_bytes()[:100])
        os.utime(path, (1000 - age, 1000 - age))
    write_file(tmp_path / "newer.ckpt.partial")
    write_file(tmp_path / "notes.txt")
    assert newest_usable(tmp_path, but=tmp_path / "newest.ckpt") == tmp_path / "usable.ckpt"
    assert newest_usable(tmp_path) == tmp_path / "newest.ckpt"
    assert newest_usable(tmp_path / "absent") is None


def test_the_newest_usable_has_the_most_steps_whatever_the_clock_said(tmp_path: Path) -> None:
    for step in (90, 100, 110):
        torch.save({"global_step": step}, tmp_path / f"{step}.ckpt")
        os.utime(tmp_path / f"{step}.ckpt", (1e9 - step, 1e9 - step))
    folder = write_folder(tmp_path / "95.ckpt")
    torch.save({"global_step": 95}, folder / "meta.pt")
    files.write_checksums(folder, {p.name: files.checksum(p) for p in folder.glob("meta.pt")})
    assert newest_usable(tmp_path, but=tmp_path / "110.ckpt") == tmp_path / "100.ckpt"
    (tmp_path / "110.ckpt").write_bytes(b"")
    (tmp_path / "100.ckpt").write_bytes(b"")
    assert newest_usable(tmp_path) == folder


def test_what_cannot_be_read_comes_last_and_a_fault_of_ours_does_not_pass_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save([1], tmp_path / "no_dict.ckpt")
    torch.save({"global_step": "9"}, tmp_path / "no_number.ckpt")
    torch.save({"global_step": 5}, tmp_path / "whole.ckpt")
    whole, draw = (tmp_path / "whole.ckpt").read_bytes(), random.Random(0)
    for number in range(100):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[draw.randrange(len(whole))] = draw.randrange(256)
        (tmp_path / f"{number}.ckpt").write_bytes(damaged[: draw.choice([len(whole), draw.randrange(len(whole))])])
    found = newest_usable(tmp_path)  # a byte between two records may change and nothing is lost
    assert found is not None
    assert torch.load(found)["global_step"] == 5

    def typo(*args: object, **options: object) -> None:
        raise NameError("no such name")

    monkeypatch.setattr(torch, "load", typo)
    with pytest.raises(NameError):
        newest_usable(tmp_path)


def test_a_save_after_a_kill_behind_both_renames_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for content in ("old", "new", "newer"):
        partial = files.partial_path(path)
        partial.mkdir()
        (partial / "part").write_text(content)
        replaced = path.with_name(path.name + files.REPLACED)
        if content == "newer":  # the kill: the replaced folder was not removed yet
            replaced.mkdir()
            (replaced / "part").write_text("old")
        files.recover(path)
        files.publish(path)
        assert (path / "part").read_text() == content
        assert not replaced.exists()
