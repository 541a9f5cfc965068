from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.description import describe_data, describe_reading
from lit_stable.data.epochs import SampleOrder
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.prepare import prepare
from lit_stable.data.sources import Source
from lit_stable.data.weights import WeightSchedule

SIZES = {"sequence_length": 8, "micro_batch": 2, "global_batch": 4}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    records = [{"text": "seven t", "score": number} for number in range(100)]  # 8 tokens each
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    prepare([tmp_path / "a.jsonl"], tmp_path / "a", "bytes", 0.0, keep="score", report=lambda line: None)
    return str(tmp_path / "a")


def test_an_ordinary_run_is_its_stores(folder):
    data = TokenDataModule({"a": Source(folder)}, **SIZES, validation={"v": f"{folder}/train"})
    data.setup()
    assert describe_data(data) == [
        "data.sources.a: 800 tokens in 100 documents",
        "data.validation.v: 800 tokens in 100 documents",
    ]
    assert describe_reading(data, 198) == ["  a: 198 samples (100.00%), 2 epochs of 99"]


def test_everything_out_of_the_ordinary_has_its_line(folder):
    data = TokenDataModule(
        {"a": Source(folder, filter="score >= 75"), "b": Source(folder)},
        **SIZES,
        order=SampleOrder("shards", 16, 2, {"5 steps": 7}),
        weight_schedule=WeightSchedule({"0": {"a": 3, "b": 1}, "100": {"a": 1, "b": 1}}),
        mask_repeats=MaskRepeats(),
    )
    data.setup()
    assert describe_data(data) == [
        "data.sources.a: 200 of 800 tokens; filter score >= 75 keeps 25 and drops 75 documents (25.0% kept)",
        "data.sources.b: 800 tokens in 100 documents",
        "order: shards of 16 windows, 2 mixed at a time",
        "what is left is shuffled anew behind 5 steps, seed 7",
        "weights (stages, by samples): 0: a 0.75, b 0.25; 100: a 0.5, b 0.5",
        "no loss on sequence with a period of 1 to 13 tokens held 32 times",
    ]
    assert describe_reading(data, 100) == [
        "  a: 75 samples (75.00%), 3.12 epochs of 24",
        "  b: 25 samples (25.00%), 0.253 epochs of 99",
    ]
    for by, line in (("stored", "order: as stored"), ("date", "order: by date")):
        other = TokenDataModule({"a": Source(folder)}, **SIZES, order=SampleOrder(by))
        assert describe_data(other) == [line]
