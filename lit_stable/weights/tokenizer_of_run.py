"""The tokenizer of the run that a checkpoint is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_stable.data.tokenizer import Tokenizer, load_tokenizer
from lit_stable.run.past_step import rebuilt_data
from lit_stable.weights.stored_model import open_model


def find_tokenizer(record: dict[str, Any], given: Path | None = None) -> Tokenizer:
    """The tokenizer that made a run's token stores.

    Args:
        record: What a checkpoint says of its run.
        given: A tokenizer JSON to read instead.

    Raises:
        ValueError: when nobody names it, or the run's data are not where they were.
    """
    if given is not None:
        return load_tokenizer(given)
    if "recipe" not in record:
        raise ValueError(
            "tokenizer=null: the checkpoint does not say what it was trained on; give --tokenizer PATH of a"
            " tokenizer.json."
        )
    data = rebuilt_data(record["recipe"])
    try:
        data.setup("fit")
    except (ValueError, OSError) as error:
        raise ValueError(
            f"tokenizer=null: the data of the run cannot be opened ({error}); give --tokenizer PATH of a"
            " tokenizer.json."
        ) from error
    return data.text_tokenizer()


def tokenizer_if_known(path: Path, given: Path | None = None) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer for a checkpoint, or none and a line that says why; one that is given must be there."""
    try:
        return find_tokenizer(open_model(path).record, given), []
    except ValueError as error:
        if given is not None:
            raise
        return None, [f"no tokenizer beside it: {error}"]
