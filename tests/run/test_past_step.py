"""What a run read at a step is what it trained on there, whatever its recipe says of the data."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dated_sources import STEPS, fit, write_sources

from lit_stable.data.tokenizer import load_tokenizer
from lit_stable.module import GPTModule
from lit_stable.run.past_step import PastStep, ReadSample


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_sources(tmp_path_factory.mktemp("past"))


@pytest.fixture
def trained(monkeypatch) -> list[tuple[int, torch.Tensor, torch.Tensor, list[int]]]:
    """(step, inputs, labels, sources) of every micro-batch that the module is given."""
    seen: list[Any] = []

    def note(module: GPTModule, batch: Any, batch_idx: int) -> None:
        original(module, batch, batch_idx)
        seen.append((module.trainer.global_step + 1, batch["input_ids"], batch["labels"], batch["source"].tolist()))

    original = GPTModule.on_train_batch_start
    monkeypatch.setattr(GPTModule, "on_train_batch_start", note)
    return seen


def read(run: Path, step: int) -> list[ReadSample]:
    return list(PastStep(run, step).read())


def require_equal(run: Path, trained: list[Any], steps: range) -> list[list[ReadSample]]:
    """What was read at those steps, which is what was trained on."""
    return [_equal_step(PastStep(run, step), [seen for seen in trained if seen[0] == step]) for step in steps]


def _equal_step(past: PastStep, micro_batches: list[Any]) -> list[ReadSample]:
    dumped = list(past.read())
    assert torch.equal(torch.stack([one.tokens for one in dumped]), torch.cat([seen[1] for seen in micro_batches]))
    masked = (torch.cat([seen[2] for seen in micro_batches]) == -100).sum(1).tolist()
    assert [one.masked for one in dumped] == masked
    names = list(past.data.source_names)
    assert [names.index(one.sample.source) for one in dumped] == [n for seen in micro_batches for n in seen[3]]
    return dumped


def windows(samples: list[list[ReadSample]]) -> list[list[int]]:
    return [[one.sample.window for one in step] for step in samples]


def documents(samples: list[list[ReadSample]]) -> list[Any]:
    return [place for step in samples for one in step for place in one.sample.documents]


BOTH = {"news": {}, "books": {}}
STORED = {"data__order": {"by": "stored"}}
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    # name: sources, changes of the recipe, and what must be true of the samples of the four steps
    "stored": (
        {"news": {}},
        STORED,
        lambda s: windows(s) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    ),
    "by_date": (
        {"news": {}},
        {"data__order": {"by": "date"}},
        lambda s: [place.number for place in documents(s)] == sorted(place.number for place in documents(s)),
    ),
    "shards": (
        {"news": {}},
        {"data__order": {"by": "shards", "shard_windows": 4, "buffer_shards": 1}},
        lambda s: (
            all(sorted(step) == list(range(min(step) // 4 * 4, min(step) // 4 * 4 + 4)) for step in windows(s))
            and windows(s) != sorted(windows(s))
        ),
    ),
    "reshuffled": (
        {"news": {}},
        {"data__order": {"by": "stored", "reshuffle": {"1 steps": 7}}},
        lambda s: (
            windows(s)[0] == [0, 1, 2, 3]
            and windows(s)[1] != [4, 5, 6, 7]
            and len({window for step in windows(s) for window in step}) == 16
        ),
    ),
    "weights": (
        BOTH,
        {"data__weight_schedule": {"marks": {"0": {"news": 1, "books": 0}, "8": {"news": 0, "books": 1}}}},
        lambda s: [{one.sample.source for one in step} for step in s] == [{"news"}, {"news"}, {"books"}, {"books"}],
    ),
    "filtered": (
        {"news": {"filter": "top 0.3 by score"}, "books": {"filter": "score < 0.2"}},
        {},
        lambda s: (
            {(p.source, p.number % 10) for p in documents(s)}
            == {("news", 7), ("news", 8), ("news", 9), ("books", 0), ("books", 1)}
        ),
    ),
    "until": (
        BOTH,
        {"data__validation_from": "2021-01-01"},
        lambda s: {place.date for place in documents(s)} == {20190101, 20200101},
    ),
    "masked": (
        {"news": {}},
        {**STORED, "data__mask_repeats": {"scope": "tokens", "min_count": 20}},
        # Documents 0, 6, 12 are 39 times `n`: windows 0 and 15, and 22 labels behind the first token of window 8.
        lambda s: (
            [[one.masked for one in step] for step in s] == [[32, 0, 0, 0], [0] * 4, [22, 0, 0, 0], [0, 0, 0, 32]]
        ),
    ),
    "skipping": ({"news": {}}, {**STORED, "data__skip_steps": ["2-3"]}, lambda s: windows(s)[1] == [12, 13, 14, 15]),
    "ramp": (
        {"news": {}},
        {**STORED, "stability__batch_size_warmup": {"ramp": "2 for 3 steps"}},
        lambda s: windows(s) == [[0, 1], [2, 3], [4, 5], [6, 7, 8, 9]],
    ),
    "truncated": (
        {"news": {}},
        {**STORED, "stability__sequence_length_warmup": {"shape": "8 for 2 steps then 32"}},
        lambda s: [len(step[0].tokens) for step in s] == [8, 8, 32, 32],
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_of_data_in_a_recipe_shows_in_what_is_trained_on_and_is_told(folder, trained, name):
    sources, changes, holds = CHOICES[name]
    run = fit(folder, name, sources, **changes)
    assert holds(require_equal(run, trained, range(1, STEPS + 1)))


def test_melted_sequences_are_told_as_they_were_cut(folder, trained):
    warmup = {"shape": "8 for 2 steps then 24 for 1 steps then 32", "mode": "melt"}
    run = fit(folder, "melted", {"news": {}}, **STORED, stability__sequence_length_warmup=warmup)
    for step, tokens in ((1, 32), (3, 24), (4, 32)):
        rows = torch.cat([seen[1] for seen in trained if seen[0] == step])
        assert torch.equal(torch.stack([one.tokens for one in read(run, step)]).flatten(), rows.flatten())
        assert len(read(run, step)[0].tokens) == tokens


def test_a_branch_is_told_by_its_own_recipe_and_what_lies_before_it_by_that_of_its_parent(folder, trained):
    order = {"reshuffle": {"3 steps": 1}}
    run = fit(folder, "twice", BOTH, data__micro_batch=1, data__order=order)
    fit(folder, "twice", BOTH, "--resume", "auto", "--trainer.max_steps", "5", data__micro_batch=1, data__order=order)
    before = list(trained)
    trained.clear()
    words = ["--resume", "auto", "--trainer.max_steps", "7", "--data.micro_batch", "4", "--data.skip_steps", "[6]"]
    fit(folder, "twice", BOTH, *words, data__order={"by": "stored"})  # the passed reshuffle stays
    branch = run.with_name("0002")
    for asked in (run, branch):
        require_equal(asked, before, range(1, 6))
        assert PastStep(asked, 4).recipe_path == run / "recipe-01.yaml"
        assert PastStep(asked, 5).recipe_path == run / "recipe-02.yaml"
    require_equal(branch, trained, range(6, 8))
    assert PastStep(branch, 6).recipe_path == branch / "recipe-01.yaml"
    assert [one.sample.position for one in read(branch, 6)] == [24, 25, 26, 27]
    assert [one.sample.position for one in read(run, 6)] == [20, 21, 22, 23]  # as it would have gone on
    run.rename(run.with_name("gone"))
    with pytest.raises(ValueError, match=r"step=5: was taken before .*0002 began, behind step 5, and the run folder"):
        PastStep(branch, 5)


def test_behind_a_rewind_the_step_is_told_as_it_was_read_at_last(folder, trained):
    rungs = [{"do": "rewind", "before": 0, "after": 1, "max_times": 2, "reshuffle": True}, {"do": "stop"}]
    drill = {"class_path": "lit_stable.run.poisoned_samples.PoisonedSamples", "init_args": {"first": 13, "last": 14}}
    recovery = {"rungs": rungs, "triggers": {"not_finite": "rewind"}}
    changes = {"stability__recovery": recovery, "stability__extra": {"drill": drill}}
    run = fit(folder, "rewound", BOTH, "--trainer.max_steps", "6", **changes)
    assert [seen[0] for seen in trained].count(4) > 2, "step 4 was read twice"
    rewound = next(n for n, (a, b) in enumerate(pairwise(trained), 1) if b[0] < a[0])
    last = PastStep(run, 4).beginning
    assert (last.session, last.dropped) == (2, [(12, 20)])
    assert [reshuffle.mark for reshuffle in last.reshuffles] == ["rewind"]
    require_equal(run, trained[:rewound], range(1, last.steps + 1))
    require_equal(run, trained[rewound:], range(last.steps + 1, 7))


def test_a_step_still_to_come_is_told_as_the_last_session_would_read_it(folder):
    run = fit(folder, "future", {"news": {}}, **STORED)
    assert [one.sample.window for one in read(run, 6)] == [20, 21, 22, 23]
    assert all(
        load_tokenizer(folder / "news" / "tokenizer.json").decode(one.tokens.tolist()) == one.sample.text
        for one in read(run, 1)
    )
