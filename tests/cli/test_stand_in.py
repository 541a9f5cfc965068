"""Sources that are not on disk, and what stands in for them."""

from __future__ import annotations

import pytest

from lit_stable.cli.stand_in import stood_in

HERE = "builtin:python-stdlib"


@pytest.fixture
def there(tmp_path):
    (tmp_path / "there").mkdir()
    return str(tmp_path / "there")


def test_names_and_weights_stay_and_all_sources_move_together(there):
    recipe = {"data": {"sources": {"c4": {"path": "/gone", "weight": 3}, "own": {"path": there}}, "micro_batch": 2}}
    assert stood_in(recipe, HERE) == (
        {"data": {"sources": {"c4": {"path": HERE, "weight": 3}, "own": {"path": HERE}}}},
        [f"data.sources.c4.path: /gone -> {HERE} (not on disk)", f"data.sources.own.path: {there} -> {HERE}"],
    )


def test_validation_sets_move_too_and_count_as_missing(there):
    recipe = {"data": {"sources": {"own": {"path": there}}, "validation": {"late": "/gone"}}}
    layer, lines = stood_in(recipe, HERE)
    assert layer["data"]["validation"] == {"late": HERE}
    assert lines[-1] == f"data.validation.late: /gone -> {HERE} (not on disk)"


def test_what_asks_for_dates_or_scores_goes_where_the_corpus_has_none(there):
    data = {"sources": {"a": {"path": "/gone", "filter": "score >= 0.5"}}, "order": {"by": "date", "shard_windows": 2}}
    data["validation_from"] = "2022-07-01"
    layer, lines = stood_in({"data": data}, HERE)
    assert layer["data"] == {
        "sources": {"a": {"path": HERE, "filter": None}},
        "order": {"by": "stored"},
        "validation_from": None,
    }
    assert lines[1:] == [
        "data.sources.a.filter: score >= 0.5 -> None",
        "data.order.by: date -> stored",
        "data.validation_from: 2022-07-01 -> None",
    ]
    assert stood_in({"data": data}, there)[0] == {"data": {"sources": {"a": {"path": there, "filter": "score >= 0.5"}}}}
    assert data["sources"]["a"]["filter"] == "score >= 0.5"


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"data": None},
        {"data": {"sources": "all"}},
        {"data": {"sources": {"a": "path"}}},
        {"data": {"sources": {"a": {"path": HERE}}, "validation": None}},
    ],
)
def test_nothing_is_done_where_nothing_is_missing_or_the_recipe_cannot_be_read(recipe):
    assert stood_in(recipe, HERE) == ({}, [])


def test_a_source_that_is_on_disk_stays(there):
    assert stood_in({"data": {"sources": {"own": {"path": there}}}}, HERE) == ({}, [])
