"""Warm-ups of batch and length on two ranks equal those on one, and a ramp goes on at another world size."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_scenarios
from lightning.pytorch import Callback
from rank_scenarios_warmups import MaskedData, MaskedSamples, by_tokens, lengths, ramp
from tiny_fit import WIDTH
from tiny_gpt_run import GLOBAL_BATCH, LENGTH, MICRO_BATCH, fit

from lit_stable.callbacks import Progress


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # The ramp shares a folder, which takes process groups that are up: it comes second.
    names = [
        "lengths_on_two_ranks",
        "ramp_on_two_ranks",
        "averaged_over_tokens_ddp",
        "averaged_over_tokens_fsdp2",
        "loaders_of_unequal_length",
        "loaders_that_run_dry",
        "batches_of_unequal_size",
        "batches_of_a_sampler_of_our_own",
        "what_one_rank_alone_would_refuse",
    ]
    found = run_scenarios(names, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_warmups.py")
    for value in found.values():
        assert "error" not in value, value["error"]
    return found


def close(rows: Any, others: Any) -> None:
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(others), rtol=1e-5, atol=1e-6)


def test_a_ramp_takes_the_same_samples_on_two_ranks_as_on_one(results: dict[str, Any]) -> None:
    two, alone = results["ramp_on_two_ranks"], fit(steps=5, windows=ramp())
    close(two["rows"], alone.rows)
    assert two["mark"] == list(Progress.of(alone.trainer).mark) == [5, 2 * 4 + 3 * 8, 32 * LENGTH]


@pytest.mark.parametrize(("saved_at", "steps_done"), [(2, 2), (3, 2), (5, 3)])
def test_a_ramp_goes_on_at_another_world_size(results: dict[str, Any], saved_at: int, steps_done: int) -> None:
    two = results["ramp_on_two_ranks"]
    resumed = fit(steps=5, windows=ramp(), ckpt_path=Path(two["folder"]) / f"m{saved_at}.ckpt")
    close(resumed.rows, two["rows"][steps_done:])
    assert two["mark"] == list(Progress.of(resumed.trainer).mark)


def test_lengths_cut_the_same_tokens_on_two_ranks_as_on_one(results: dict[str, Any]) -> None:
    two, alone = results["lengths_on_two_ranks"], fit(steps=6, callbacks=(lengths(),))
    close(two["rows"], alone.rows)
    tokens = 8 * sum(lengths().length(step) for step in range(1, 7))
    assert two["mark"] == list(Progress.of(alone.trainer).mark) == [6, 48, tokens]


class ByHand(Callback):
    """Loss and norm of the gradient of one batch of all that the first step sees."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        batches = list(itertools.islice(MaskedSamples(0, 0, 1), GLOBAL_BATCH // MICRO_BATCH))
        inputs, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
        loss = torch.nn.functional.cross_entropy(pl_module(inputs).flatten(0, 1), labels.flatten())
        gradients = torch.autograd.grad(loss, list(pl_module.parameters()))
        self.loss, self.norm = float(loss), float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_steps_averaged_over_tokens_are_those_of_one_big_batch(results: dict[str, Any], strategy: str) -> None:
    two = results[f"averaged_over_tokens_{strategy}"]
    assert two["same_bits"], "resumed in mid-window"
    hand = ByHand()
    alone = fit(steps=3, windows=by_tokens(), data=MaskedData(), validates=False, callbacks=(hand,))
    close(two["rows"], alone.rows)
    _, loss, _, norm = two["rows"][0]
    assert (loss, norm) == (pytest.approx(hand.loss, rel=1e-5), pytest.approx(hand.norm, rel=1e-5))


def test_shards_are_reduced_at_every_micro_batch_so_that_a_longer_window_takes_no_more_memory(
    results: dict[str, Any],
) -> None:
    assert results["averaged_over_tokens_fsdp2"]["held"] == [pytest.approx(0.5, rel=0.02)] * 3  # odd rows
    assert results["averaged_over_tokens_ddp"]["held"] == [1.0] * 3


@pytest.mark.parametrize("name", ["loaders_of_unequal_length", "loaders_that_run_dry"])
def test_epochs_end_with_the_shortest_loader_on_every_rank(name: str, results: dict[str, Any]) -> None:
    found = results[name]
    (mark, weights), other = found["ranks"]
    assert mark == [6, 20, 20 * WIDTH]  # windows of 2, 2 and 1 micro-batches of one sample on each rank, twice
    assert other == [mark, weights]
    assert found["validated"] == [[3, 6], [3, 6]]


def test_loaders_without_a_length_that_run_dry_one_by_one_are_told_of(results: dict[str, Any]) -> None:
    told = results["loaders_that_run_dry"]["told"]
    assert told[0] > 0
    assert told[1] == 0  # the first rank speaks for all


def test_ranks_count_alike_what_differs_from_one_to_the_other(results: dict[str, Any]) -> None:
    found = results["batches_of_unequal_size"]
    steps = [0, 1, 1, 2, 2, 3, 3, 4]  # of 2 micro-batches of 1 + 3 samples
    assert found["marks"] == [[[step, 8 * step, 8 * WIDTH * step] for step in steps]] * 2
    assert found["validated"] == [[2, 3, 4]] * 2  # 64, 96 and 128 tokens; also the last


def test_a_batch_sampler_of_our_own_is_left_as_it_is_and_shards_by_itself(results: dict[str, Any]) -> None:
    found = results["batches_of_a_sampler_of_our_own"]
    first, second = ([place for pair in zip(*epoch, strict=True) for place in pair] for epoch in halves(found["read"]))
    assert sorted(first) == sorted(second) == list(range(6))  # no item on both ranks
    assert first != second
    assert all("set `Trainer(use_distributed_sampler=False)`" in line for line in found["refusal"])


def halves(by_rank: list[list[int]]) -> list[list[list[int]]]:
    """The first three batches of each rank, and the last three."""
    return [[own[:3] for own in by_rank], [own[3:] for own in by_rank]]


def test_what_one_rank_alone_would_refuse_is_refused_by_all(results: dict[str, Any]) -> None:
    found = results["what_one_rank_alone_would_refuse"]
    assert found["messages"][0] == found["messages"][1]
    interval, empty, emptied = found["messages"][0]
    assert interval.startswith(
        "`Trainer(val_check_interval=4)`: the shortest training loader of 2 ranks holds 3 batches"
    )
    assert empty.startswith("training loader: no batch in epoch 0 on 1 of 2 ranks")
    assert emptied.startswith("training loader: no batch in epoch 1 on 1 of 2 ranks")
    assert found["interval"] == [["int", "float", "float"]] * 2
