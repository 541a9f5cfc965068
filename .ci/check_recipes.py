"""Resolve every recipe with `lit-stable check`, in one process a core.

The processes are forked after everything is imported, and each builds the parser of a system once.
"""

from __future__ import annotations

import gc
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from tiny_recipe import command  # noqa: E402

from lit_stable.cli.recipe import expand_arguments  # noqa: E402
from lit_stable.cli.systems import system_asked_for  # noqa: E402

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
    words = [word for config in configs_of(recipe) for word in ("--config", config)]
    sees = system_asked_for(expand_arguments(words).layers, words) == "vlm"
    done = command("check", *words, *(NO_BACKBONES if sees else []))
    return f"{recipe.relative_to(ROOT)}: exit code {done.code}\n{done.out}{done.err}" if done.code else None


def run() -> int:
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    gc.freeze()  # what was imported lives on: the collector need not walk it in every fork
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        problems = [problem for problem in pool.map(check, recipes) if problem is not None]
    print("\n".join([*problems, f"{len(recipes) - len(problems)} of {len(recipes)} recipes resolve"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run())
