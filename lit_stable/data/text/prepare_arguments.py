"""What can be wrong with the arguments of `prepare`, before anything is read."""

from __future__ import annotations

import re
from pathlib import Path

from lit_stable.data.conditions import DocumentFilter, filter_problem
from lit_stable.data.text.artefacts import ArtefactLimits
from lit_stable.data.text.documents import parse_date
from lit_stable.data.tokenizer import check_tokenizer_spec

_KEY = re.compile(r"[\w.\-]+")
ALWAYS_KEPT = ("date", "source")


def kept_keys(keep: str, condition: DocumentFilter | None) -> tuple[str, ...]:
    """The keys of a list ``a,b`` and of a filter whose values are kept in columns; date and source always are."""
    wanted = [*(key.strip() for key in keep.split(",")), *(condition.keys if condition is not None else [])]
    return tuple(key for key in dict.fromkeys(wanted) if key and key not in ALWAYS_KEPT)


def prepare_problems(
    out: Path,
    tokenizer: str,
    validation_fraction: float | None,
    validation_from: str | None,
    separator: str | None,
    keep: str,
    filter: str | None,
    limits: ArtefactLimits,
    workers: int,
) -> list[str]:
    """Every problem, one per line; see ``prepare`` for the arguments."""
    problems = [problem] if (problem := check_tokenizer_spec(tokenizer)) else []
    if validation_fraction is not None and not 0 <= validation_fraction < 1:
        problems.append(f"validation_fraction={validation_fraction}: must be at least 0 and below 1.")
    if validation_from is not None:
        problems += _date_problems(validation_from, validation_fraction)
    if separator == "":
        problems.append("separator='': must not be empty; leave it out to make each file a document.")
    wrong = [key for key in kept_keys(keep, None) if not _KEY.fullmatch(key)]
    problems += [f"keep={key}: must be a key of letters, digits, _, - and dots." for key in wrong]
    if filter is not None and (problem := filter_problem(filter)):
        problems.append(problem)
    if workers < 1:
        problems.append(f"workers={workers}: must be at least 1.")
    return problems + limits.problems()


def _date_problems(validation_from: str, validation_fraction: float | None) -> list[str]:
    if validation_fraction is not None:
        return [
            f"validation_from={validation_from} and validation_fraction={validation_fraction}: each says what goes to"
            " validation; give one of them."
        ]
    try:
        if parse_date(validation_from):
            return []
    except ValueError:
        pass
    return [f"validation_from={validation_from}: must be a date, YYYY-MM-DD or yyyymmdd."]
