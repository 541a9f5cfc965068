"""What was typed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from lit_stable.cli.recipe_file import Layer
from lit_stable.cli.shipped_recipes import shipped_recipes
from lit_stable.strategies.launcher import launched_devices

#: Options that say where a run begins.
_WHERE = ("--resume", "--ckpt_path", "--ckpt_part")


@dataclass(frozen=True)
class Command:
    """What was typed, and where its recipes were found."""

    name: str
    typed: list[str]
    argv: list[str]
    """What was typed, with each recipe in place of its name."""
    layers: list[Layer]
    notes: list[str]
    """What was scaled, and which sources stand in for others."""
    problems: tuple[str, ...] = ()
    """What is wrong with the recipes as texts, whatever their keys mean."""
    is_whole: bool = True
    """Whether all recipes could be read, so that what they lack is lacking."""

    @property
    def default_name(self) -> str:
        """Name of a run that is given none: that of the last recipe, behind it the sizes it is scaled to."""
        experiments = [_name(layer.path) for layer in self.layers if layer.directives.scale is None]
        sizes = [layer.path.stem for layer in self.layers if layer.directives.scale is not None]
        return "-".join([*(experiments[-1:] or ["run"]), *sizes])

    @property
    def to_go_on(self) -> str:
        """The same command, going on in the run that it began, started as this one was."""
        kept, value_follows = [], False
        for word in self.typed:
            if word in _WHERE:
                value_follows = True
            elif value_follows:
                value_follows = False
            elif word.partition("=")[0] not in _WHERE:
                kept.append(word)
        launched, program, where = launched_devices(), ["lit-stable"], ""
        if launched:
            hosts = launched["num_nodes"]
            alone = ["--standalone"] if hosts == 1 else ["--nnodes", str(hosts)]
            program = [*["torchrun", *alone, "--nproc-per-node"], str(launched["devices"]), "-m", "lit_stable"]
            where = "" if hosts == 1 else f"on each of {hosts} hosts, with their rendezvous: "
        return where + shlex.join([*program, self.name, *kept, "--resume", "auto"])


def _name(path: Path) -> str:
    """The name of a recipe file; of one of several shipped ones of the same name, with its folder in front."""
    shipped = shipped_recipes()
    alike = [name for name in shipped if name.rsplit("/", 1)[-1] == path.stem]
    return (
        f"{path.parent.name}-{path.stem}"
        if len(alike) > 1 and f"{path.parent.name}/{path.stem}" in alike
        else path.stem
    )
