"""What `check` says about the data."""

from __future__ import annotations

import json

from tiny_recipe import command, write_recipe


def test_stores_filters_order_and_what_a_run_reads_are_shown(tmp_path):
    records = [{"text": "x" * 31, "score": number} for number in range(100)]  # 32 tokens each
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = ["--tokenizer", "bytes", "--validation_fraction", "0", "--keep", "score"]
    assert command("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "a", *words).code == 0
    recipe = write_recipe(tmp_path, trainer__max_steps=60)
    sources = f"{{a: {{path: {tmp_path}/a, filter: top 0.5 by score}}, b: {{path: {tmp_path}/a}}}}"
    schedule = "{marks: {0: {a: 1, b: 1}, 200: {a: 0, b: 1}}}"
    options = ["--data.sources", sources, "--data.weight_schedule", schedule, "--data.order.by", "stored"]
    done = command("check", "--config", recipe, *options, "--data.order.reshuffle", "{10 steps: 3}")
    assert done.code == 0, done.err
    start = done.out.index("data:\n")
    assert done.out[start:].split("\n\n")[0].splitlines() == [
        "data:",
        "  data.sources.a: 1,600 of 3,200 tokens; filter top 0.5 by score keeps 50 and drops 50 documents (50.0% kept)",
        "  data.sources.b: 3,200 tokens in 100 documents",
        "  order: as stored",
        "  what is left is shuffled anew behind 10 steps, seed 3",
        "  weights (stages, by samples): 0: a 0.5, b 0.5; 200: a 0, b 1",
        "in 60 steps:",
        "  a: 100 samples (41.67%), 2.04 epochs of 49",
        "  b: 140 samples (58.33%), 1.41 epochs of 99",
    ]


def test_samples_follow_the_ramp(tmp_path):
    recipe = write_recipe(tmp_path, trainer__max_steps=5)
    page = command("check", "--config", recipe, "--stability.batch_size_warmup.ramp", "2 for 2 steps").out
    assert "in 5 steps:\n  text: 16 samples (100.00%)" in page  # two of 2, three of 4


def test_built_in_data_are_not_tokenised_for_a_page():
    done = command("check", "--config", "quickstart", "--data.order.by", "stored")
    assert "data: built in; opened by the first fit\n  order: as stored\n" in done.out


def test_a_filter_that_the_store_cannot_serve_is_refused(tmp_path):
    recipe = write_recipe(tmp_path)
    sources = f"{{a: {{path: {tmp_path}/store, filter: rank > 3}}}}"
    done = command("check", "--config", recipe, "--data.sources", sources)
    assert done.code == 2
    assert "filter=rank > 3: rank is not kept in" in done.err
    assert "prepare it with --keep rank." in done.err
