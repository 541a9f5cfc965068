from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import VOCAB, fit
from tokens_by_hand import by_hand
from torch import Tensor

from lit_stable.callbacks import TokenStatistics
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.token_statistics import occurrences, repeated_ngrams


def test_numbers_of_a_whole_window_by_hand() -> None:
    batches: list[list[list[int]]] = []

    def keep(trainer: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 1:
            batches.append(batch["input_ids"].tolist())

    run = fit(steps=2, callbacks=(TokenStatistics(ngram=3), Watch("on_train_batch_start", keep)))
    rows = [row for batch in batches for row in batch]
    assert len(rows) == 8
    found = {
        n: float(v)
        for n, v in run.trainer.callback_metrics.items()
        if n.startswith(("stability/token", "stability/rep"))
    }
    top = int(found.pop("stability/token_top_id"))
    assert Counter(t for row in rows for t in row)[top] == max(Counter(t for row in rows for t in row).values())
    assert found == pytest.approx(by_hand(rows, 3), rel=1e-9)


def test_a_batch_of_nothing_but_backslashes_cannot_be_missed() -> None:
    class Backslashes(TinyModule):
        def token_ids(self, batch: Tensor) -> Tensor:
            return torch.full((2, 64), 92)

    trainer = quiet_trainer(TokenStatistics(vocab_size=256), max_steps=1, log_every_n_steps=1)
    trainer.fit(Backslashes(), TinyData())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["stability/token_entropy"] == 0.0
    assert metrics["stability/token_top_share"] == 1.0
    assert metrics["stability/token_top_id"] == 92.0
    assert metrics["stability/repeated_ngrams"] == 60 / 61


def test_a_window_that_an_epoch_cut_short_is_in_no_other() -> None:
    class Numbered(TinyModule):
        """Each batch is of one token, its number; the third ends its epoch."""

        number = -1

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if self.number == 3 else None

        def token_ids(self, batch: Tensor) -> Tensor:
            self.number += 1
            return torch.full((2, 8), self.number)

    tokens: list[list[int]] = []
    statistics = TokenStatistics(vocab_size=16)
    note = Watch("on_before_backward", lambda *_: tokens.append(statistics._sums[:16].nonzero().flatten().tolist()))
    options = {"max_steps": 3, "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    quiet_trainer(note, statistics, **options).fit(Numbered(), TinyData())
    assert tokens == [[0], [0, 1], [2], [4], [4, 5], [6], [6, 7]]


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_repeated_ngrams_by_hand(n: int) -> None:
    ids = torch.randint(0, 3, (20, 12))
    expected = [by_hand([row], n)["stability/repeated_ngrams"] for row in ids.tolist()]
    assert repeated_ngrams(ids, n).tolist() == pytest.approx(expected)


def test_a_sequence_shorter_than_an_ngram_repeats_nothing() -> None:
    assert repeated_ngrams(torch.zeros(2, 3, dtype=torch.long), 4).tolist() == [0.0, 0.0]


def test_ids_beyond_the_vocabulary_count_as_its_last() -> None:
    assert occurrences(torch.tensor([[0, 1, 9, -100]]), 3).tolist() == [2.0, 1.0, 1.0]


def test_the_vocabulary_is_the_models_own_or_must_be_given() -> None:
    run = fit(steps=1, callbacks=(monitor := TokenStatistics(),))
    assert monitor._size == VOCAB
    assert run.trainer.global_step == 1
    with pytest.raises(MisconfigurationException, match=r"TinyModule has no config.vocab_size; give vocab_size"):
        quiet_trainer(TokenStatistics(), max_steps=1).fit(TinyModule(), TinyData())


def test_a_batch_without_token_ids_is_refused() -> None:
    trainer = quiet_trainer(TokenStatistics(vocab_size=4), max_steps=1, log_every_n_steps=1)
    with pytest.raises(MisconfigurationException, match=r"batch of type Tensor: holds no integer tensor"):
        trainer.fit(TinyModule(), TinyData())


@pytest.mark.parametrize("option", ["vocab_size", "ngram"])
def test_sizes_below_1_are_refused(option: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`TokenStatistics\({option}=0\)`: must be at least 1"):
        TokenStatistics(**{option: 0})
