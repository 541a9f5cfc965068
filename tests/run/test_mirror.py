"""Copies are whole or absent, compared with their source, tried again, and never made twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.run.mirror import RECORD, Mirror, ObjectStore, PlainFolder, open_target


class Flaky:
    """Fails or lies in its first tries."""

    def __init__(self, target: Any, fails: int = 0, lies: int = 0) -> None:
        self.target, self.fails, self.lies, self.puts = target, fails, lies, 0

    def clear(self, name: str) -> None:
        self.target.clear(name)

    def put(self, source: Path, name: str) -> tuple[int, int]:
        self.puts += 1
        if self.puts <= self.fails:
            raise OSError("unplugged")
        size, crc = self.target.put(source, name)
        return size, crc ^ (self.puts <= self.lies)

    def finish(self, name: str) -> None:
        self.target.finish(name)


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    file, folder = tmp_path / "step-00000001.ckpt", tmp_path / "step-00000002.ckpt"
    file.write_bytes(b"one file")
    (folder / "sub").mkdir(parents=True)
    for name in ("a", "sub/b"):
        (folder / name).write_bytes(name.encode())
    return [file, folder]


def copy(made: Mirror, path: Path) -> None:
    made.add(path)
    made.close()


def mirror(checkpoints: list[Path], target: Any, **options: Any) -> Mirror:
    made = Mirror(target, checkpoints[0].parent, **{"pause": 0.0, **options})
    for path in checkpoints:
        made.add(path)
        made.add(path)
    made.close()
    return made


def test_files_and_folders_are_copied_and_recorded(checkpoints: list[Path], tmp_path: Path) -> None:
    made = mirror(checkpoints, PlainFolder(tmp_path / "m"))
    assert all(map(made.is_verified, checkpoints))
    assert (tmp_path / "m" / "step-00000001.ckpt").read_bytes() == b"one file"
    assert (tmp_path / "m" / "step-00000002.ckpt" / "sub" / "b").read_bytes() == b"sub/b"
    assert not list((tmp_path / "m").glob("*.partial"))
    again = Flaky(PlainFolder(tmp_path / "m"))
    mirror(checkpoints, again)
    assert again.puts == 0


@pytest.mark.parametrize("fault", ["fails", "lies"])
def test_what_fails_or_comes_wrong_is_tried_again(checkpoints: list[Path], tmp_path: Path, fault: str) -> None:
    target = Flaky(PlainFolder(tmp_path / "m"), **{fault: 2})
    assert all(map(mirror(checkpoints, target, attempts=3).is_verified, checkpoints))


@pytest.mark.parametrize(("fault", "text"), [("fails", "unplugged"), ("lies", "has \\(bytes, CRC-32\\)")])
def test_what_never_comes_right_is_given_up_and_has_no_name(
    checkpoints: list[Path], tmp_path: Path, fault: str, text: str
) -> None:
    with pytest.warns(UserWarning, match=text):
        made = mirror(checkpoints[:1], Flaky(PlainFolder(tmp_path / "m"), **{fault: 9}), attempts=2)
    assert not made.is_verified(checkpoints[0])
    assert not (tmp_path / "m" / checkpoints[0].name).exists()
    assert not (tmp_path / RECORD).exists()


def test_what_was_given_up_is_copied_with_the_next_one(checkpoints: list[Path], tmp_path: Path) -> None:
    made = Mirror(Flaky(PlainFolder(tmp_path / "m"), fails=2), tmp_path, attempts=2, pause=0.0)
    with pytest.warns(UserWarning, match=r"unplugged; it stays where it is, and is copied with the next one\."):
        copy(made, checkpoints[0])
    copy(made, checkpoints[1])
    assert all(map(made.is_verified, checkpoints))
    assert (tmp_path / "m" / checkpoints[0].name).read_bytes() == b"one file"


def test_of_what_was_given_up_nothing_is_copied_that_is_gone_by_then(checkpoints: list[Path], tmp_path: Path) -> None:
    made = Mirror(Flaky(PlainFolder(tmp_path / "m"), fails=1), tmp_path, attempts=1, pause=0.0)
    with pytest.warns(UserWarning, match="unplugged"):
        copy(made, checkpoints[0])
    checkpoints[0].unlink()
    copy(made, checkpoints[1])
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [checkpoints[1].name]


def test_a_copy_without_a_record_does_not_count(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left")

    made = Mirror(PlainFolder(tmp_path / "m"), tmp_path, pause=0.0)
    with monkeypatch.context() as patch:
        patch.setattr("lit_stable.run.mirror.write_whole", full)
        with pytest.warns(UserWarning, match="no space left; it stays where it is"):
            copy(made, checkpoints[0])
    assert not made.is_verified(checkpoints[0])
    copy(made, checkpoints[1])
    assert list(json.loads((tmp_path / RECORD).read_text())) == [path.name for path in reversed(checkpoints)]


def test_while_nothing_can_be_copied_what_was_given_up_waits(checkpoints: list[Path], tmp_path: Path) -> None:
    """Or each checkpoint of a run whose disk is gone would try all those before it, and the end wait for that."""
    (third := tmp_path / "step-00000003.ckpt").write_bytes(b"3")
    target = Flaky(PlainFolder(tmp_path / "m"), fails=4)
    made = Mirror(target, tmp_path, attempts=2, pause=0.0)
    for path in (checkpoints[0], third):
        with pytest.warns(UserWarning, match="unplugged"):
            copy(made, path)
    assert target.puts == 4
    copy(made, checkpoints[1])
    assert all(map(made.is_verified, [*checkpoints, third]))


def test_of_a_copy_that_was_given_up_nothing_takes_up_room(checkpoints: list[Path], tmp_path: Path) -> None:
    made = Mirror(Flaky(PlainFolder(tmp_path / "m"), lies=4), tmp_path, attempts=2, pause=0.0)
    for path in checkpoints:
        with pytest.warns(UserWarning, match="instead of"):
            copy(made, path)
    assert list((tmp_path / "m").iterdir()) == []


def test_what_was_written_over_behind_a_rewind_is_not_called_complete_before_it_is(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """Nor does it keep files of the older one, which had more parts."""
    pytest.importorskip("fsspec")
    file, folder = checkpoints
    target = open_target("memory://rewound/runs", tmp_path / "name" / "0001")
    fs, root = target._fs, target._root
    made = mirror(checkpoints, target)
    file.write_bytes(b"another branch")
    (folder / "sub" / "b").unlink()
    (folder / "a").write_bytes(b"of another branch")
    made.target = Flaky(target, lies=1)
    made.attempts = 1
    with pytest.warns(UserWarning, match="instead of"):
        copy(made, file)
    assert not fs.exists(f"{root}/{file.name}.complete")
    copy(made, folder)
    assert all(map(made.is_verified, checkpoints))
    assert fs.cat(f"{root}/{file.name}") == b"another branch"
    assert [name.rpartition("/")[2] for name in fs.find(f"{root}/{folder.name}")] == ["a"]
    assert all(fs.exists(f"{root}/{path.name}.complete") for path in checkpoints)


def test_a_url_is_opened_by_fsspec_and_says_what_is_complete(checkpoints: list[Path], tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    target = open_target("memory://bucket/runs", tmp_path / "name" / "0001")
    assert isinstance(target, ObjectStore)
    assert all(map(mirror(checkpoints, target).is_verified, checkpoints))
    fs = fsspec.filesystem("memory")
    assert fs.cat_file("/bucket/runs/name/0001/step-00000002.ckpt/sub/b") == b"sub/b"
    assert fs.exists("/bucket/runs/name/0001/step-00000002.ckpt.complete")
    fs.rm("/bucket", recursive=True)


def test_a_scheme_that_nobody_opens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"checkpoints\.mirror=nope://x/.*cannot be opened"):
        open_target("nope://x", tmp_path / "name" / "0001")


def test_a_record_that_was_cut_short_costs_a_copy(checkpoints: list[Path], tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text('["step-000')
    mirror(checkpoints, PlainFolder(tmp_path / "m"))
    assert list(json.loads((tmp_path / RECORD).read_text())) == [path.name for path in checkpoints]


def test_another_checkpoint_of_the_same_name_is_not_taken_for_its_copy(checkpoints: list[Path], tmp_path: Path) -> None:
    """As a run writes them again that has stepped back."""
    made = mirror(checkpoints, PlainFolder(tmp_path / "m"))
    checkpoints[0].write_bytes(b"anything")
    os.utime(checkpoints[0], ns=(1, 1))
    assert not made.is_verified(checkpoints[0])
    assert made.is_verified(checkpoints[1])
    assert mirror(checkpoints, PlainFolder(tmp_path / "m")).is_verified(checkpoints[0])
    assert (tmp_path / "m" / checkpoints[0].name).read_bytes() == b"anything"
