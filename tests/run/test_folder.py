"""Numbered folders and the checkpoints in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_stable.run.folder import (
    checkpoint_path,
    checkpoint_step,
    checkpoints,
    find_checkpoint,
    new_folder,
    newest_run_with_checkpoint,
    run_folders,
)


def write_checkpoint(folder: Path, step: int) -> Path:
    path = checkpoint_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_each_new_folder_has_the_next_number(tmp_path):
    assert [new_folder(tmp_path, "a").name for _ in range(2)] == ["0001", "0002"]
    assert new_folder(tmp_path, "b") == tmp_path / "b" / "0001"


def test_a_gap_is_not_filled(tmp_path):
    (tmp_path / "a" / "0007").mkdir(parents=True)
    assert new_folder(tmp_path, "a").name == "0008"


def test_a_folder_that_another_process_just_made_is_not_taken(tmp_path, monkeypatch):
    new_folder(tmp_path, "a")
    monkeypatch.setattr("lit_stable.run.folder.run_folders", lambda root, name: [])  # looked before it was made
    assert new_folder(tmp_path, "a").name == "0002"


def test_runs_are_sorted_by_number_and_other_folders_are_no_runs(tmp_path):
    for name in ("10000", "9999", "notes"):
        (tmp_path / "a" / name).mkdir(parents=True)
    assert [folder.name for folder in run_folders(tmp_path, "a")] == ["9999", "10000"]
    assert run_folders(tmp_path, "none") == []


def test_a_checkpoint_carries_its_step_in_its_name(tmp_path):
    path = checkpoint_path(tmp_path, 120)
    assert path == tmp_path / "checkpoints" / "step-00000120.ckpt"
    assert checkpoint_step(path) == 120
    assert checkpoint_step(checkpoint_path(tmp_path, 123_456_789)) == 123_456_789


@pytest.mark.parametrize(
    "name", ["step-00000120.ckpt.partial", "step-00000120.ckpt.replaced", "best.json", "last.ckpt"]
)
def test_other_files_are_no_checkpoints(tmp_path, name):
    assert checkpoint_step(tmp_path / name) is None


def test_checkpoints_are_sorted_by_step(tmp_path):
    written = [write_checkpoint(tmp_path, step) for step in (999_999_999, 5, 100)]
    write_checkpoint(tmp_path, 200).rename(tmp_path / "checkpoints" / "step-00000200.ckpt.partial")
    assert checkpoints(tmp_path) == [written[1], written[2], written[0]]
    assert checkpoints(tmp_path / "none") == []


def test_a_checkpoint_that_was_being_replaced_counts_again(tmp_path):
    path = write_checkpoint(tmp_path, 5)
    path.rename(path.with_name(path.name + ".replaced"))
    assert checkpoints(tmp_path) == [path]


def test_the_newest_run_with_a_checkpoint_is_found_behind_newer_empty_ones(tmp_path):
    first, second, _ = (new_folder(tmp_path, "a") for _ in range(3))
    assert newest_run_with_checkpoint(tmp_path, "a") is None
    write_checkpoint(first, 9)
    write_checkpoint(second, 1)
    assert newest_run_with_checkpoint(tmp_path, "a") == second


def test_last_is_the_last_checkpoint_of_the_newest_run(tmp_path):
    folder = new_folder(tmp_path, "a")
    write_checkpoint(folder, 1)
    last = write_checkpoint(folder, 2)
    assert find_checkpoint("last", tmp_path, "a") == last
    assert find_checkpoint(str(folder), Path("elsewhere"), "b") == last
    assert find_checkpoint(f"{tmp_path.name}/a/0001", tmp_path.parent, "b") == last
    assert find_checkpoint(str(checkpoint_path(folder, 1)), Path("elsewhere"), "b") == checkpoint_path(folder, 1)


def test_a_path_may_begin_with_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "runs" / "a" / "0001"
    first = checkpoint_path(folder, 1)
    first.parent.mkdir(parents=True)
    first.touch()
    for given in ("~/runs/a/0001", f"~/{first.relative_to(tmp_path)}", "~/runs/a/0001@1"):
        assert find_checkpoint(given, Path("elsewhere"), "b") == first


def test_last_without_any_checkpoint_is_refused(tmp_path):
    new_folder(tmp_path, "a")
    with pytest.raises(ValueError, match=r"ckpt_path=last: no run of 'a' under .* `--resume auto`, which starts"):
        find_checkpoint("last", tmp_path, "a")


def test_a_run_folder_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="this run folder has no checkpoint yet; name another"):
        find_checkpoint(str(tmp_path), tmp_path, "a")


def test_a_missing_path_is_refused_with_what_lies_beside_it(tmp_path):
    with pytest.raises(ValueError, match=r"gone.ckpt: does not exist; .* has no checkpoint\."):
        find_checkpoint(str(tmp_path / "gone.ckpt"), tmp_path, "a")
    write_checkpoint(tmp_path, 5)
    with pytest.raises(ValueError, match=r"step-6.ckpt: does not exist; .*checkpoints has step-00000005.ckpt\."):
        find_checkpoint(str(tmp_path / "checkpoints" / "step-6.ckpt"), tmp_path, "a")


def test_a_step_of_a_run_is_found_by_folder_by_place_and_by_name(tmp_path):
    root = tmp_path / "runs"
    first, second = new_folder(root, "v2.0"), new_folder(root, "v2.0")
    old, _, new = write_checkpoint(first, 4), write_checkpoint(first, 115_500), write_checkpoint(second, 115_500)
    assert find_checkpoint(f"{second}@115500", Path("elsewhere"), "b") == new
    assert find_checkpoint("v2.0/0002@115_500", root, "b") == new
    assert find_checkpoint("v2.0@115500", root, "b") == new
    assert find_checkpoint("v2.0@4", root, "b") == old


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    first, second = new_folder(tmp_path, "a"), new_folder(tmp_path, "a")
    write_checkpoint(first, 4), write_checkpoint(first, 8)
    with pytest.raises(
        ValueError, match=rf"ckpt_path=a@5: no checkpoint of that step; {first} has 4, 8; .* has none\."
    ):
        find_checkpoint("a@5", tmp_path, "b")
    with pytest.raises(ValueError, match=r"0001@5: no checkpoint of that step; .*0001 has 4, 8\."):
        find_checkpoint(f"{first}@5", tmp_path, "b")
    assert second.is_dir()


def test_a_run_that_is_not_there_is_refused_with_the_nearest(tmp_path):
    new_folder(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"lama@5: lama is neither a run folder nor the name of a run; .* is llama\."):
        find_checkpoint("lama@5", tmp_path, "b")


def test_a_file_with_an_at_sign_is_a_file(tmp_path):
    path = tmp_path / "copy@5"
    path.write_bytes(b"")
    assert find_checkpoint(str(path), tmp_path, "b") == path
