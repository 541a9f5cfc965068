from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lit_stable.callbacks.shorter_batch import melt, truncate

B, T = 2, 6


class Pair(NamedTuple):
    ids: torch.Tensor
    rest: Any


def numbered() -> torch.Tensor:
    return torch.arange(B * T).view(B, T)


def test_truncation_keeps_the_beginning_and_the_structure() -> None:
    batch = Pair(numbered(), {"wide": torch.zeros(B, T, 3), "source": torch.zeros(B), "other": torch.zeros(B, 4)})
    short = truncate(batch, (B, T), 4)
    assert isinstance(short, Pair)
    assert short.ids.tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert short.ids.is_contiguous()
    assert {name: tuple(t.shape) for name, t in short.rest.items()} == {
        "wide": (2, 4, 3),
        "source": (2,),
        "other": (2, 4),
    }


def test_melting_makes_rows_of_the_pieces_in_order_and_drops_the_rest() -> None:
    whole = melt(numbered(), (B, T), 3)
    assert whole.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert melt(numbered(), (B, T), 4).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_melting_repeats_what_belongs_to_a_row() -> None:
    batch = {"ids": numbered(), "source": torch.tensor([7, 8]), "wide": torch.zeros(B, T, 3), "scalar": torch.tensor(5)}
    short = melt(batch, (B, T), 2)
    assert short["source"].tolist() == [7, 7, 7, 8, 8, 8]
    assert short["wide"].shape == (6, 2, 3)
    assert short["scalar"].item() == 5


def test_the_batch_that_was_given_is_left_alone() -> None:
    batch = {"ids": numbered()}
    truncate(batch, (B, T), 2)
    melt(batch, (B, T), 2)
    assert torch.equal(batch["ids"], numbered())
