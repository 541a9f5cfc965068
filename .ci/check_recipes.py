"""Resolve every recipe with `lit-stable check`, in one process a core: much of a command's time is importing torch."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lit_stable.__main__ import main
from lit_stable.cli.recipe import expand_arguments
from lit_stable.cli.systems import system_asked_for

ROOT = Path(__file__).parents[1]


#: What stands for a whole recipe in front of those that are laid over one, by folder or name.
BEFORE = {
    "stability": "quickstart",
    "sizes": "gpt_1b3",
    "rescue_control.yaml": str(ROOT / "recipes" / "demo" / "rescue.yaml"),
    "language_shape.yaml": "hf_vlm/language",
    "pairs.yaml": "hf_vlm/captions",
}
#: The backbones of a model that sees are runs of its own, which nobody has trained here.
NO_BACKBONES = ["--model.language", "null", "--model.vision.run", "null"]


def configs_of(recipe: Path) -> list[str]:
    before = BEFORE.get(recipe.name) or BEFORE.get(recipe.parent.name)
    return [*([before] if before else []), str(recipe)]


def check(recipe: Path) -> str | None:
    """What the command says of a recipe that does not resolve."""
    said = io.StringIO()
    words = [word for config in configs_of(recipe) for word in ("--config", config)]
    sees = system_asked_for(expand_arguments(words).layers, words) == "vlm"
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["check", *words, *(NO_BACKBONES if sees else [])])
    return f"{recipe.relative_to(ROOT)}: exit code {code}\n{said.getvalue()}" if code else None


def run() -> int:
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        problems = [problem for problem in pool.map(check, recipes) if problem is not None]
    print("\n".join([*problems, f"{len(recipes) - len(problems)} of {len(recipes)} recipes resolve"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run())
