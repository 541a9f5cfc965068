"""All options of the training data at once, at random: a run that is cut up anywhere reads what a whole one does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_stable.callbacks import BatchSizeWarmup
from lit_stable.callbacks.progress import Progress
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.epochs import SampleOrder
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.prepare import prepare
from lit_stable.data.sources import Source
from lit_stable.data.tokenizer import Tokenizer
from lit_stable.data.weights import WeightSchedule

LENGTH, GLOBAL_BATCH, STEPS = 8, 8, 14
RAMP = "4 for 3 steps"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sources by date, 2019 to 2022, with a score; every fifth document is one letter over and over."""
    folder = tmp_path_factory.mktemp("together")
    for name, count in (("news", 90), ("books", 50)):
        records = [
            {
                "text": name[0] * 14 if n % 5 == 0 else f"{name} {n * 7919 % 1000:03d}",
                "date": 20190101 + n * 37 % 4 * 10_000 + n % 28,
                "score": n % 10 / 10,
            }
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
        options = {"keep": "score", "order": "date", "report": lambda line: None}
        prepare([folder / f"{name}.jsonl"], folder / name, "bytes", 0.0, **options)
    return folder


@dataclass
class Part:
    """A stretch of a run between two saves."""

    until: int
    ranks: int
    micro_batch: int


def data_of(folder, options: dict[str, Any], micro_batch: int) -> TokenDataModule:
    options = {key: value for key, value in options.items() if key != "ramp"}
    filters = options.pop("filters")
    sources = {name: Source(str(folder / name), filter=text) for name, text in filters.items()}
    return TokenDataModule(sources, LENGTH, micro_batch, GLOBAL_BATCH, num_workers=0, **options)


def read_part(folder, options, part: Part, saved: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """(inputs, labels, sources) of each step until ``part.until``, and what a checkpoint holds there."""
    data, progress = data_of(folder, options, part.micro_batch), Progress()
    callbacks: list[Any] = [progress]
    if options["ramp"]:
        callbacks.append(BatchSizeWarmup(RAMP, fit_micro_batch=True))
        callbacks[-1].adopt(data)
    data.setup("fit")
    if saved is not None:
        progress.load_state_dict(saved["progress"])
        if saved["data"]:
            data.load_state_dict(saved["data"])
    loaders = []
    for rank in range(part.ranks):  # each has its own copy of what is restored, as in processes of their own
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(callbacks=callbacks, strategy=strategy, global_rank=rank, world_size=part.ranks)  # type: ignore[assignment]
        loaders.append(iter(data.train_dataloader()))
    steps = []
    while progress.steps < part.until:
        batch, micro_batch = GLOBAL_BATCH, part.micro_batch
        if options["ramp"]:
            batch, micro_batch = callbacks[-1].window_at(progress.samples, part.ranks)
        rows = [next(loader) for _ in range(batch // (micro_batch * part.ranks)) for loader in loaders]
        steps.append([torch.cat([row[key] for row in rows]) for key in ("input_ids", "labels", "source")])
        progress.steps, progress.samples = progress.steps + 1, progress.samples + batch
    data.trainer = SimpleNamespace(callbacks=callbacks)  # type: ignore[assignment]
    return steps, {"progress": progress.state_dict(), "data": data.state_dict(), "module": data}


FILTERS = [None, "score >= 0.3", "top 0.6 by score", "score > 0.1 and top 0.5 by date", "source != nothing"]
MARKS = [{"0": {"news": 3, "books": 1}, "40": {"news": 0, "books": 1}, "70": {"news": 1, "books": 1}}]
OPTIONS = st.fixed_dictionaries(
    {
        "filters": st.fixed_dictionaries({"news": st.sampled_from(FILTERS), "books": st.sampled_from(FILTERS)}),
        "order": st.builds(
            SampleOrder,
            by=st.sampled_from(["shuffle", "shards", "stored", "date"]),
            shard_windows=st.integers(1, 9),
            buffer_shards=st.integers(1, 3),
            reshuffle=st.dictionaries(
                st.sampled_from(["2 steps", "6 steps", "11 steps", "21 samples", "64 samples"]),
                st.integers(0, 3),
                max_size=3,
            ),
        ),
        "weight_schedule": st.none()
        | st.builds(WeightSchedule, st.sampled_from(MARKS), st.sampled_from(["stages", "linear"])),
        "validation_from": st.sampled_from([None, "2021-06-01"]),
        "mask_repeats": st.none()
        | st.builds(MaskRepeats, st.just(2), st.just(3), st.sampled_from(["sequence", "tokens"])),
        "skip_steps": st.sampled_from([[], ["3-4"], ["1", "9-12"], [6]]),
        "seed_data": st.integers(0, 3),
        "ramp": st.booleans(),
    }
)
CUTS = st.lists(
    st.builds(Part, st.integers(0, STEPS), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])), max_size=4
).map(lambda parts: [*sorted(parts, key=lambda part: part.until), Part(STEPS, 2, 2)])


@given(options=OPTIONS, parts=CUTS)
@settings(deadline=None, max_examples=15)
def test_a_run_that_is_cut_up_reads_what_a_whole_one_reads_and_what_the_ledger_says(folder, options, parts):
    whole, end = read_part(folder, options, Part(STEPS, 1, 1 if options["ramp"] else GLOBAL_BATCH), None)
    read, saved = [], None
    for part in parts:
        steps, saved = read_part(folder, options, part, saved)
        read += steps
    assert len(read) == len(whole) == STEPS
    for step, (ours, theirs) in enumerate(zip(read, whole, strict=True), 1):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
    assert saved is not None
    assert saved["progress"] == end["progress"]
    assert saved["data"] == end["data"]
    data: TokenDataModule = end["module"]
    ledger = data.ledger([tuple(stretch) for stretch in end["progress"]["dropped"]])
    tokenizer: Tokenizer = data.text_tokenizer()
    for step in (1, 5, STEPS):
        texts = [tokenizer.decode(row) for row in whole[step - 1][0].tolist()]
        assert [sample.text for sample in ledger.step(step)] == texts
