"""Recipes over two sources of 60 short documents by date, with a score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_recipe import command, write_recipe

STEPS = 4


def write_sources(folder: Path) -> Path:
    """``news`` and ``books``: 39 bytes and the end of text each, every sixth document one letter over and over."""
    for name in ("news", "books"):
        records = [
            {
                "text": name[0] * 39 if n % 6 == 0 else f"{name} {n:02d} the quick brown fox jumps over it"[:39],
                "date": 20190101 + n // 15 * 10_000,
                "score": n % 10 / 10,
            }
            for n in range(60)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
        words = ["--tokenizer", "bytes", "--validation_fraction", "0", "--keep", "score", "--order", "date"]
        done = command("prepare", folder / f"{name}.jsonl", "--out", folder / name, *words)
        assert done.code == 0, done.err
    return folder


def fit(folder: Path, name: str, sources: dict[str, Any], *words: str | Path, **changes: Any) -> Path:
    """Train on them for four steps of four samples of 32 tokens; the run folder."""
    recipe = write_recipe(folder, f"{name}.yaml", validate_every=100, trainer__max_steps=STEPS, **changes)
    named = {key: {"path": str(folder / key), **options} for key, options in sources.items()}
    done = command("fit", "--config", recipe, "--data.sources", json.dumps(named), *words)
    assert done.code == 0, done.err
    return folder / "runs" / name / "0001"
