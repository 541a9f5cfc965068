"""What can be wrong with the arguments of the data module, before anything is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_stable.data.batch_sizes import batch_size_problems
from lit_stable.data.skip import parse_steps
from lit_stable.data.sources import weight_problems
from lit_stable.data.tokenizer import check_tokenizer_spec

if TYPE_CHECKING:
    from lit_stable.data.datamodule import TokenDataModule


def argument_problems(data: TokenDataModule) -> list[str]:
    """Every problem of the arguments, one per line."""
    problems = batch_size_problems(data.micro_batch, data.global_batch)
    smallest = {"sequence_length": 1, "num_workers": 0, "seed_data": 0}
    for name, least in smallest.items():
        if getattr(data, name) < least:
            problems.append(f"data.{name}={getattr(data, name)}: must be at least {least}.")
    if data.validation_windows is not None and data.validation_windows < 1:
        problems.append(f"data.validation_windows={data.validation_windows}: must be at least 1, or null for all.")
    if problem := check_tokenizer_spec(data.tokenizer):
        problems.append(f"data.{problem}")
    try:
        parse_steps(data.skip_steps)
    except ValueError as error:
        problems.append(str(error))
    return problems + weight_problems({name: source.weight for name, source in data.sources.items()})
