"""What all ranks of a run must have in common before they begin: strategy, recipe, tokens, code and folder."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_stable.callbacks import Recovery
from lit_stable.callbacks.private_names import saves_shards
from lit_stable.callbacks.rank_agreement import refuse_ranks_that_differ
from lit_stable.callbacks.shared_folder import refuse_unshared, who_does_not_see
from lit_stable.environment import code_digest, frameworks
from lit_stable.run.branch import leaves
from lit_stable.run.console import say

#: A host's own business: where it keeps its copy of the data, and how many processes read it. A kill file is looked for
#: by rank 0 alone.
_OF_A_HOST = re.compile(r"config|data\.sources\..*\.path|data\.validation\..*|data\.num_workers|control\.kill_file")
#: Mappings whose order counts too: sources share one stream in it, validation sets are gone through in it.
_IN_ORDER = ("data.sources", "data.validation", "stability.extra")


def compare_strategies(trainer: Trainer) -> None:
    """Have ranks compare their strategies as soon as they are connected, under every one of them.

    What a strategy does next has all ranks wait for each other, each kind of it elsewhere.
    """
    strategy = trainer.strategy
    strategy.setup_environment = functools.partial(  # type: ignore[method-assign]
        _connect_and_compare, strategy.setup_environment, type(strategy).__name__
    )


def _connect_and_compare(connect: Callable[[], None], name: str) -> None:
    connect()
    if name != "FSDP2Strategy":  # which does so before it makes its mesh
        refuse_ranks_that_differ(f"strategy {name}", {})


def refuse_recipes_that_differ(trainer: Trainer, recipe: dict[str, Any]) -> None:
    """Raise on all ranks where they have other recipes, tokens, versions or code; called by all of them.

    Args:
        trainer: Whose data are set up.
        recipe: This rank's, resolved.

    Raises:
        MisconfigurationException: naming the first rank that differs from rank 0, and what differs.
    """
    facts = {key: value for key, value in leaves(recipe).items() if not _OF_A_HOST.fullmatch(key)}
    for key in _IN_ORDER:
        group, _, name = key.partition(".")
        facts[f"{key} in order"] = list(recipe.get(group, {}).get(name) or ())
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    facts |= {f"{name} (tokens)": value for name, value in data.fingerprint().items()}
    facts |= {f"{name} (index)": value for name, value in data.opened.identities().items()}
    refuse_ranks_that_differ("its recipe", {**facts, **frameworks(), "the code of lit-stable": code_digest()})


def look_from_all_hosts(trainer: Trainer, folder: Path) -> None:
    """See to it that all ranks see the folder of a run, before it is made; called by all of them.

    Raises:
        MisconfigurationException: where one does not, and each rank writes there, or goes back to what lies there.
    """
    folder = trainer.strategy.broadcast(folder)
    rewinds = any(isinstance(callback, Recovery) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if saves_shards(trainer) or rewinds:
        refuse_unshared(folder)
    elif other := who_does_not_see(folder):
        say(
            f"{folder}: {other} does not see it; checkpoints and logs will be on rank 0's host alone, and all hosts"
            " must see a checkpoint from which the run is to go on."
        )
