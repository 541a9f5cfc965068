from __future__ import annotations

import pytest

from lit_stable.data.ledger import Ledger
from lit_stable.data.mixture import Mixture
from lit_stable.data.stream import TokenStream


@pytest.fixture
def parts(make_store):
    documents = [[ord(letter)] * 11 for letter in "abcdefgh"]  # 12 tokens each with the end of text
    stores = [make_store(name, documents=documents, source=name) for name in ("news", "web")]
    return Mixture(["news", "web"], [1, 1], [store.num_windows(6) for store in stores], seed=5), stores


def test_a_step_is_named_as_the_stream_reads_it(parts):
    mixture, stores = parts
    dropped = [(8, 16)]
    samples = Ledger(mixture, stores, 6, lambda step: (step - 1) * 4, dropped).step(4)
    assert [sample.position for sample in samples] == [20, 21, 22, 23]
    stream = TokenStream(mixture, stores, 6, start=12, dropped=dropped, micro_batch=4)
    rows = stream.read(next(stream.positions()))
    for row, sample in enumerate(samples):
        assert sample.source == mixture.sources[int(rows["source"][row])]
        expected = "".join("<|endoftext|>" if id_ == 256 else chr(id_) for id_ in rows["input_ids"][row].tolist())
        assert sample.text == expected
        assert [place.number for place in sample.documents] == [sample.window * 6 // 12]
        assert sample.documents[0].source == sample.source


def test_a_batch_size_ramp_decides_the_samples_of_a_step(parts):
    sizes = [1, 2, 3]
    ledger = Ledger(*parts, 6, lambda step: sum(sizes[: step - 1]))
    assert [len(ledger.step(step)) for step in (1, 2, 3)] == sizes
    assert [sample.position for sample in ledger.step(3)] == [3, 4, 5]


def test_steps_count_from_one(parts):
    with pytest.raises(ValueError, match="step=0: optimizer steps count from 1"):
        Ledger(*parts, 6, lambda step: step).step(0)
