"""Where sessions began, on disk."""

from __future__ import annotations

import json

import pytest
from tiny_recipe import command, write_recipe

from lit_stable.data.reshuffle import Settled
from lit_stable.run.beginnings import FILE, Beginning, read_beginnings, write_beginning

ONE = Beginning(1, 5, 40, 2, [(8, 16)], [Settled("3 steps", 7, 24)], {"data.sources.text": "9 tokens (ab)"})


def test_what_is_written_is_read_and_a_cut_line_is_left_out(tmp_path):
    write_beginning(tmp_path, ONE)
    write_beginning(tmp_path, ONE)
    with (tmp_path / FILE).open("a") as file:
        file.write(json.dumps({"session": 3})[:-3])
    assert read_beginnings(tmp_path) == [ONE, ONE]


def test_a_line_behind_a_cut_one_is_one_of_its_own(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"session": 3})[:-3])
    write_beginning(tmp_path, ONE)
    assert read_beginnings(tmp_path) == [ONE]


@pytest.mark.parametrize("line", ["{}", "[1]", '{"dropped": 3, "reshuffles": []}'])
def test_a_whole_line_that_says_something_else_is_refused_with_its_number(tmp_path, line):
    write_beginning(tmp_path, ONE)
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"sessions\.jsonl: line 2 does not say where a session began"):
        read_beginnings(tmp_path)


def test_a_file_of_which_nothing_can_be_read_is_named(tmp_path):
    (tmp_path / FILE).write_bytes(b"\xff\xfegarbage\n")
    with pytest.raises(ValueError, match=r"sessions\.jsonl: none of its 1 lines can be read"):
        read_beginnings(tmp_path)


def test_a_folder_without_any_is_no_run_folder(tmp_path):
    with pytest.raises(ValueError, match=r"has no sessions\.jsonl, so it is no run folder"):
        read_beginnings(tmp_path)


def test_every_session_adds_a_line_with_where_it_stands(tmp_path):
    order = {"reshuffle": {"1 steps": 3, "50 steps": 4}}
    recipe = write_recipe(tmp_path, data__order=order, data__skip_steps=["2"], trainer__max_steps=2)
    for words in ([], ["--trainer.max_steps", "3"]):
        done = command("fit", "--config", recipe, "--resume", "auto", *words)
        assert done.code == 0, done.err
    first, second = read_beginnings(tmp_path / "runs" / "tiny" / "0001")
    assert (first.session, first.steps, first.samples, first.ranks) == (1, 0, 0, 1)
    assert (second.session, second.steps, second.samples, second.ranks) == (2, 2, 8, 1)
    assert first.dropped == second.dropped == [(4, 8)]
    # The point behind step 1 is the one at which the skipped stretch begins, which is not read.
    assert first.reshuffles == [Settled("1 steps", 3, 8), Settled("50 steps", 4, 204)]
    assert second.reshuffles == first.reshuffles
    assert first.stores == second.stores
    assert first.stores.keys() == {"data.sources.text", "data.validation.text"}
