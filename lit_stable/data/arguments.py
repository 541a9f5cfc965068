"""What can be wrong with the arguments of the data module, before anything is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lit_stable.data.batch_sizes import batch_size_problems
from lit_stable.data.conditions import filter_problem
from lit_stable.data.reshuffle import parse_marks
from lit_stable.data.skip import parse_steps
from lit_stable.data.sources import weight_problems
from lit_stable.data.text.documents import parse_date
from lit_stable.data.tokenizer import check_tokenizer_spec

if TYPE_CHECKING:
    from lit_stable.data.datamodule import TokenDataModule

_LONGEST = 100_000_000  # tokens; so many of as many samples are a number of 64 bits


def argument_problems(data: TokenDataModule) -> list[str]:
    """Every problem of the arguments, one per line."""
    problems = batch_size_problems(data.micro_batch, data.global_batch)
    smallest = {"sequence_length": 1, "num_workers": 0, "seed_data": 0}
    for name, least in smallest.items():
        if getattr(data, name) < least:
            problems.append(f"data.{name}={getattr(data, name)}: must be at least {least}.")
    if data.sequence_length > _LONGEST:
        problems.append(f"data.sequence_length={data.sequence_length}: must be at most {_LONGEST:,}.")
    if data.validation_windows is not None and data.validation_windows < 1:
        problems.append(f"data.validation_windows={data.validation_windows}: must be at least 1, or null for all.")
    if problem := check_tokenizer_spec(data.tokenizer):
        problems.append(f"data.{problem}")
    problems += _raised(parse_steps, data.skip_steps) + _raised(parse_marks, data.order.reshuffle)
    problems += data.order.problems()
    if data.mask_repeats is not None:
        problems += data.mask_repeats.problems()
    return problems + _mixture_problems(data) + _choice_problems(data)


def _mixture_problems(data: TokenDataModule) -> list[str]:
    weights = {name: source.weight for name, source in data.sources.items()}
    problems = weight_problems(weights)
    if data.weight_schedule is None:
        return problems
    twice = [f"data.sources.{name}.weight={weight}" for name, weight in weights.items() if weight != 1]
    if twice:
        problems.append(f"{', '.join(twice)} and data.weight_schedule: each says the mixture; give one of them.")
    return problems + data.weight_schedule.problems(list(data.sources))


def _choice_problems(data: TokenDataModule) -> list[str]:
    problems = [
        f"data.sources.{name}.{problem}"
        for name, source in data.sources.items()
        if source.filter is not None and (problem := filter_problem(source.filter))
    ]
    if data.validation_from is not None and (
        _raised(parse_date, data.validation_from) or str(data.validation_from) == "0"
    ):
        problems.append(f"data.validation_from={data.validation_from}: must be a date, YYYY-MM-DD or yyyymmdd.")
    return problems


def _raised(parse: Callable[[Any], object], value: Any) -> list[str]:
    try:
        parse(value)
    except ValueError as error:
        return [str(error)]
    return []
