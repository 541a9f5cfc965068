"""What must be alike on all ranks, and what each of them must manage: all go on, or all end with the same sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .base import MisconfigurationException
from .rank_gather import gather_objects, this_rank

T = TypeVar("T")
_FEW, _LONGEST = 3, 80
_REMEDY = "all ranks train one model by one recipe: start them all with the same command, files and versions"


def refuse_ranks_that_differ(what: str, facts: Mapping[str, Any]) -> None:
    """Raise on all ranks where a fact differs between them; called by all of them.

    Ranks that were started with other recipes or code either wait for each other for ever or, worse, train on: under
    DDP every rank steps with a learning rate of its own.

    Args:
        what: What the facts are about; ranks that ask about different things differ too.
        facts: Plain data by name; they differ where they are written differently.

    Raises:
        MisconfigurationException: naming the first rank that differs from rank 0, both hosts and up to three facts.
    """
    (zeroth, first), *others = _of_all(what, {name: repr(value) for name, value in facts.items()})
    for rank, other in others:
        unlike = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if unlike:
            pairs = [(name, *_cut(other.get(name, "unset"), first.get(name, "unset"))) for name in unlike[:_FEW]]
            lines = [f"{name} is {a} and {b} on rank 0" for name, a, b in pairs]
            more = f"; {len(unlike) - _FEW} more" if len(unlike) > _FEW else ""
            raise MisconfigurationException(f"{rank}, unlike {zeroth}: {'; '.join(lines)}{more}; {_REMEDY}.")


def _cut(*texts: str) -> tuple[str, ...]:
    """Of texts that are long, what stands around the first place where they differ."""
    if max(map(len, texts)) <= _LONGEST:
        return texts
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    begin = max(0, sum(1 for _ in alike) - _LONGEST // 2)
    end = begin + _LONGEST
    return tuple(("..." if begin else "") + text[begin:end] + ("..." if text[end:] else "") for text in texts)


def on_every_rank(what: str, act: Callable[[], T]) -> T:
    """Do something on each rank that may fail on one alone, as where a host lacks a file; called by all of them.

    Args:
        what: What is done; ranks that do different things differ.
        act: Does it.

    Raises:
        ValueError: on ranks that managed it where another did not, since they would wait for that one; it names that
            rank, its host and what it says. Where ``act`` raised something, that.
        MisconfigurationException: where ranks do different things.
    """
    error: Exception | None = None
    try:
        done = act()
    except Exception as own:
        error = own
    every = _of_all(what, None if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, said in every:
        if said is not None:
            raise ValueError("\n".join(f"{rank}: {line}" for line in said.splitlines()))
    return done


def _of_all(what: str, thing: Any) -> list[tuple[str, Any]]:
    """("rank 2 on HOST", thing) of every rank, all of which are about the same."""
    every = gather_objects((this_rank(), what, thing))
    zeroth, first, _ = every[0]
    for rank, other, _ in every:
        if other != first:
            raise MisconfigurationException(f"{rank} begins with {other}, {zeroth} with {first}; {_REMEDY}.")
    return [(rank, thing) for rank, _, thing in every]
