"""What must be alike on all ranks, and what each of them must manage: all go on, or all end with the same sentence."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .base import MisconfigurationException
from .rank_gather import gather_objects

T = TypeVar("T")
_FEW, _LONGEST = 3, 80
_REMEDY = "all ranks train one model by one recipe: start them all with the same command, files and versions"


def refuse_ranks_that_differ(what: str, facts: Mapping[str, Any]) -> None:
    """Raise on all ranks where a fact differs between them; called by all of them, with plain data that compares.

    Ranks that were started with other recipes or code either wait for each other for ever or, worse, train on: under
    DDP every rank steps with a learning rate of its own.

    Args:
        what: What the facts are about; ranks that ask about different things differ too.
        facts: By name.

    Raises:
        MisconfigurationException: naming the first rank that differs from rank 0, its host and up to three facts.
    """
    every = _of_all(what, dict(facts))
    host, first = every[0]
    for rank, (other_host, other) in enumerate(every):
        unlike = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if unlike:
            lines = [f"{name} is {_told(other, name)} and {_told(first, name)} on rank 0" for name in unlike[:_FEW]]
            more = f"; {len(unlike) - _FEW} more" if len(unlike) > _FEW else ""
            raise MisconfigurationException(
                f"rank {rank} on {other_host}, unlike rank 0 on {host}: {'; '.join(lines)}{more}; {_REMEDY}."
            )


def _told(facts: Mapping[str, Any], name: str) -> str:
    text = str(facts.get(name, "not there"))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def on_every_rank(what: str, act: Callable[[], T]) -> T:
    """Do something on each rank that may fail on one alone, as where a host lacks a file; called by all of them.

    Args:
        what: What is done; ranks that do different things differ.
        act: Does it.

    Raises:
        ValueError: on ranks that managed it where another did not, since they would wait for that one; it names that
            rank, its host and what it says. Where ``act`` raised a ``ValueError`` or ``OSError``, that.
        MisconfigurationException: where ranks do different things.
    """
    error: ValueError | OSError | None = None
    try:
        done = act()
    except (ValueError, OSError) as own:
        error = own
    every = _of_all(what, None if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, (host, said) in enumerate(every):
        if said is not None:
            raise ValueError("\n".join(f"rank {rank} on {host}: {line}" for line in said.splitlines()))
    return done


def _of_all(what: str, thing: Any) -> list[tuple[str, Any]]:
    """(host, thing) of every rank, all of which are about the same."""
    every = gather_objects((socket.gethostname(), what, thing))
    host, first, _ = every[0]
    for rank, (other_host, other, _) in enumerate(every):
        if other != first:
            raise MisconfigurationException(
                f"rank {rank} on {other_host} begins with {other}, rank 0 on {host} with {first}; {_REMEDY}."
            )
    return [(host, thing) for host, _, thing in every]
