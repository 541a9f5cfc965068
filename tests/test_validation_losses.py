"""Validation losses by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lit_stable.validation_losses import ValidationLosses

CPU = torch.device("cpu")


def losses(sets: dict[str, list[str]], *batches: tuple[int, list[float], list[int], list[int]]) -> dict[str, float]:
    """Feed batches of (set, loss sums, token counts, sources)."""
    metric = ValidationLosses()
    metric.start(sets, CPU)
    for index, sums, counts, sources in batches:
        metric.update(index, torch.tensor(sums), torch.tensor(counts), torch.tensor(sources))
    return {name: float(value) for name, value in metric.compute().items()}


def test_losses_are_means_over_tokens_not_over_samples_or_batches():
    found = losses({"text": ["text"]}, (0, [6.0, 2.0], [3, 1], [0, 0]), (0, [12.0], [2], [0]))
    assert found == pytest.approx(
        {"val/loss": 20 / 6, "val/text/loss": 20 / 6, "val/text/perplexity": math.exp(20 / 6)}
    )


def test_sets_and_the_sources_they_mix_are_told_apart():
    sets = {"web": ["a", "b"], "code": ["c"]}
    found = losses(
        sets,
        (0, [2.0, 9.0, 4.0], [2, 3, 2], [0, 1, 0]),
        (1, [10.0], [2], [0]),
    )
    assert {name: value for name, value in found.items() if name.endswith("loss")} == pytest.approx(
        {
            "val/loss": 25 / 9,
            "val/web/loss": 15 / 7,
            "val/web/a/loss": 6 / 4,
            "val/web/b/loss": 9 / 3,
            "val/code/loss": 5.0,
        }
    )
    assert found["val/web/b/perplexity"] == pytest.approx(math.exp(3.0))


def test_a_source_that_was_not_seen_has_no_line():
    found = losses({"web": ["a", "b"]}, (0, [2.0], [2], [1]))
    assert set(found) == {"val/loss", "val/web/loss", "val/web/perplexity"}


def test_padded_rows_do_not_count():
    assert losses({"t": ["t"]}, (0, [6.0, 0.0], [3, 0], [0, 0]))["val/loss"] == 2.0


def test_a_set_without_any_token_is_not_a_number():
    found = losses({"full": ["x"], "empty": ["y"]}, (0, [6.0], [3], [0]))
    assert found["val/loss"] == 2.0
    assert math.isnan(found["val/empty/loss"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stays_so_and_spoils_only_its_own(value):
    found = losses({"bad": ["x"], "good": ["y"]}, (0, [value, 1.0], [1, 1], [0, 0]), (1, [4.0], [2], [0]))
    assert found["val/bad/loss"] == pytest.approx(value, nan_ok=True)
    assert found["val/loss"] == pytest.approx(value, nan_ok=True)
    assert found["val/good/loss"] == 2.0


def test_one_more_token_counts_beyond_what_fp32_can_count():
    found = losses({"t": ["t"]}, (0, [float(2**24)], [2**24], [0]), *[(0, [1.0], [1], [0])] * 4, (0, [4.0], [0], [0]))
    assert found["val/loss"] == (2**24 + 8) / (2**24 + 4) != 1.0


def test_a_new_pass_begins_at_zero():
    metric = ValidationLosses()
    for loss in (8.0, 2.0):
        metric.start({"t": ["t"]}, CPU)
        metric.update(0, torch.tensor([loss]), torch.tensor([2]), torch.tensor([0]))
    assert float(metric.compute()["val/loss"]) == 1.0
