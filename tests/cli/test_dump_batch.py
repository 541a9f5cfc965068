"""`lit-stable dump-batch`: the page, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dated_sources import fit, write_sources
from tiny_recipe import command

from lit_stable.run.batch_page import dump_batch
from lit_stable.run.beginnings import FILE


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_sources(tmp_path_factory.mktemp("dump"))


@pytest.fixture(scope="module")
def run(folder) -> Path:
    return fit(
        folder,
        "page",
        {"news": {"filter": "date >= 2020-01-01"}},
        data__mask_repeats={"min_count": 20},
        data__order={"by": "stored"},
    )


def test_the_page(run):
    page = command("dump-batch", run, "--step", "1", "--text").out.splitlines()
    assert page[:6] == [
        f"{run}: step 1, samples 0 to 3 of the run, on 1 data-parallel rank; recipe-01.yaml, begun behind step 0",
        "shown: 4 of news",
        "rank  micro-batch  sample  source  epoch  window  without loss  documents",
        "0     0            0       news    0      0       0/32          news 15 (2020-01-01)",
        "    news 15 the quick brown fox jump",
        "0     0            1       news    0      1       0/32          news 15-16 (2020-01-01)",
    ]
    assert page[8] == "    fox jumps over <|endoftext|>news 17 the quic"
    assert len(page) == 3 + 2 * 4


def test_neighbouring_documents_of_a_source_are_told_together(folder):
    words = ["--data.sequence_length", "160", "--model.gpt.max_length", "160"]  # four documents
    sources = {"news": {"filter": "score >= 0.4"}}
    run = fit(folder, "wide", sources, *words, data__order={"by": "stored"})
    told = [line.partition("news    ")[2] for line in dump_batch(run, 1).splitlines()[3:5]]
    assert told == [
        "0      0       news 4-7 (2019-01-01)",
        "0      1       news 8-9 (2019-01-01), news 14-15 (2019-01-01 to 2020-01-01)",
    ]


def test_shortened_sequences_are_told(folder):
    warmup = {"shape": "24 for 2 steps then 32", "mode": "melt"}
    run = fit(folder, "short", {"news": {}}, stability__sequence_length_warmup=warmup, data__order={"by": "stored"})
    page = dump_batch(run, 1, text=True).splitlines()
    assert page[2] == "rows of 24 tokens: the first 24 of 32"
    assert page[5] == "    " + "n" * 24
    assert dump_batch(run, 3).splitlines()[2].startswith("rank")


def test_a_rank_is_told_apart_as_the_run_had_them(run, tmp_path):
    copy = tmp_path / "0001"
    copy.mkdir()
    (copy / "recipe-01.yaml").write_text((run / "recipe-01.yaml").read_text())
    (copy / FILE).write_text((run / FILE).read_text().replace('"ranks": 1', '"ranks": 2') + '{"session": 2, "st')
    rows = [re.split("  +", line) for line in dump_batch(copy, 2).splitlines()[3:]]
    assert [row[:3] for row in rows] == [["0", "0", "4"], ["0", "0", "5"], ["1", "0", "6"], ["1", "0", "7"]]
    assert dump_batch(copy, 2, rank=1).splitlines()[3:] == dump_batch(copy, 2).splitlines()[5:]
    with pytest.raises(ValueError, match="rank=2: the step was read by data-parallel ranks 0 to 1"):
        dump_batch(copy, 2, rank=2)


def test_what_cannot_be_told_is_refused_in_a_sentence(run, folder, tmp_path):
    done = command("dump-batch", run, "--step", "0")
    assert (done.code, done.err) == (2, "lit-stable dump-batch: step=0: optimizer steps count from 1.\n")
    done = command("dump-batch", tmp_path, "--step", "1")
    assert done.code == 2
    assert "has no sessions.jsonl, so it is no run folder, or its run never began" in done.err
    (folder / "news").rename(folder / "gone")
    try:
        assert "data.sources.news=" in command("dump-batch", run, "--step", "1").err
        (folder / "news").symlink_to(folder / "books")
        other = command("dump-batch", run, "--step", "1").err
        (folder / "news").unlink()
    finally:
        (folder / "gone").rename(folder / "news")
    assert re.search(r"data\.sources\.news: holds \d+ tokens \(\w+, date >= 2020-01-01\), and the run read ", other)
