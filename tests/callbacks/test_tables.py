"""The tables of callbacks: README.md has those that act on a run, docs/callbacks.md the others; each stands in one."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract_entries import ACTING, ENTRIES

ROOT = Path(__file__).resolve().parents[2]
HEAD = ["Callback", "What it does", "Source", "Strategies", "Cost"]
STRATEGIES = {"all": ("auto", "ddp", "fsdp", "fsdp2"), "one device": ("auto",)}


def table(page: str) -> list[list[str]]:
    """Cells, by row, of the one table with these columns."""
    lines = (ROOT / page).read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    first = rows.index(HEAD) + 2
    return rows[first : first + [line[:1] for line in lines[first:]].index("")]


def test_every_public_callback_has_a_row_in_one_of_them() -> None:
    assert sorted(row[0] for row in table("README.md")) == sorted(f"`{name}`" for name in ACTING)
    assert sorted(row[0] for row in table("docs/callbacks.md")) == sorted(f"`{n}`" for n in ENTRIES if n not in ACTING)


@pytest.mark.parametrize("row", [*table("README.md"), *table("docs/callbacks.md")], ids=lambda row: row[0].strip("`"))
def test_a_row_says_all_there_is_to_say_and_the_strategies_of_the_contract(row: list[str]) -> None:
    assert len(row) == len(HEAD)
    assert all(row)
    named = [STRATEGIES.get(one, (one.strip("`"),)) for one in row[3].split(", ")]
    assert sorted(strategy for each in named for strategy in each) == sorted(ENTRIES[row[0].strip("`")].strategies)
