from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lit_stable.callbacks.positions import stream_position
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.mixture import Mixture
from lit_stable.data.stream import TokenStream, stream_positions

LENGTH = 8


@pytest.fixture
def make_stream(make_store):
    stores = [make_store(name, num_tokens=LENGTH * 40 + 1, source=name) for name in ("a", "b")]
    mixture = Mixture(["a", "b"], [2, 1], [40, 40], seed=3)

    def make(**arguments) -> TokenStream:
        return TokenStream(mixture, stores, LENGTH, **({"micro_batch": 4} | arguments))

    return make


def take(stream: TokenStream, count: int, num_workers: int = 0) -> list[torch.Tensor]:
    """Each row is source, inputs and last label: what identifies a sample."""
    batches = iter(DataLoader(stream, batch_size=None, num_workers=num_workers))
    return [
        torch.cat([batch["source"][:, None], batch["input_ids"], batch["labels"][:, -1:]], dim=1)
        for batch, _ in zip(batches, range(count), strict=False)
    ]


def positions_of_steps(stream_of_rank, steps: int, global_batch: int, micro_batch: int, size: int) -> list[list[int]]:
    """Stream positions that each optimizer step reads, over all ranks."""
    streams = [stream_of_rank(micro_batch=micro_batch, rank=rank, size=size).positions() for rank in range(size)]
    windows = global_batch // (micro_batch * size)
    return [
        sorted(int(position) for stream in streams for _ in range(windows) for position in next(stream))
        for _ in range(steps)
    ]


def test_labels_are_the_next_tokens(make_stream):
    batch = next(iter(make_stream()))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, LENGTH)
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(batch, torch.int64)
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["input_ids"] % 250, (batch["input_ids"][:, :1] + torch.arange(LENGTH)) % 250)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_inputs_and_labels_share_no_memory(make_stream, micro_batch):
    batch = next(iter(make_stream(micro_batch=micro_batch)))
    inputs = batch["input_ids"].clone()
    batch["labels"].fill_(-100)
    assert torch.equal(batch["input_ids"], inputs)


def test_masked_tokens_are_no_labels_and_stay_inputs(make_stream):
    class Odd(MaskRepeats):
        def mask(self, tokens):
            return tokens % 2 == 1

    plain, masked = (make_stream(mask_repeats=mask).read(np.arange(4)) for mask in (None, Odd()))
    assert torch.equal(plain["input_ids"], masked["input_ids"])
    odd = plain["labels"] % 2 == 1
    assert torch.equal(masked["labels"], torch.where(odd, -100, plain["labels"]))
    assert odd.any()


def test_rows_are_the_windows_that_the_mixture_names(make_stream):
    stream = make_stream()
    batch = stream.read(np.array([5, 77]))
    sources, _, windows = stream.mixture.locate(np.array([5, 77]))
    assert batch["source"].tolist() == sources.tolist()
    for row in range(2):
        expected = stream.stores[sources[row]].window(int(windows[row]), LENGTH)
        assert batch["input_ids"][row].tolist() == expected[:-1].tolist()


@pytest.mark.parametrize("num_workers", [1, 4])
def test_order_does_not_depend_on_workers(make_stream, num_workers):
    for alone, together in zip(take(make_stream(), 9), take(make_stream(), 9, num_workers), strict=True):
        assert torch.equal(alone, together)


@pytest.mark.parametrize(("micro_batch", "size"), [(1, 1), (2, 4), (8, 2), (16, 1), (4, 1), (1, 16)])
def test_a_step_reads_the_same_samples_however_it_is_split(make_stream, micro_batch, size):
    def stream_of_rank(**arguments):
        return make_stream(start=48, dropped=[(50, 66), (90, 92)], **arguments)

    split = positions_of_steps(stream_of_rank, 4, 16, micro_batch, size)
    assert split == positions_of_steps(stream_of_rank, 4, 16, 16, 1)
    assert split[0] == [48, 49, *range(66, 80)]


@pytest.mark.parametrize("start", [0, 4, 20, 100])
def test_a_resume_continues_the_uninterrupted_order(make_stream, start):
    dropped = [(8, 16), (40, 44)]
    straight = torch.cat(take(make_stream(dropped=dropped), 30))
    resumed = torch.cat(take(make_stream(dropped=dropped, start=start), 3))
    assert torch.equal(resumed, straight[start : start + 12])


def test_dropped_samples_are_never_read(make_stream):
    straight = torch.cat(take(make_stream(), 10))
    dropping = torch.cat(take(make_stream(dropped=[(8, 24)]), 6))
    assert torch.equal(dropping, torch.cat([straight[:8], straight[24:]]))


def test_positions_agree_with_the_scalar_rule():
    dropped = [(0, 3), (10, 20), (21, 25)]
    consumed = np.arange(30)
    expected = [stream_position(count, dropped) for count in range(30)]
    assert stream_positions(consumed, dropped).tolist() == expected
    assert consumed.tolist() == list(range(30))


def test_a_stream_has_no_length_and_no_state(make_stream):
    with pytest.raises(TypeError, match="has no len"):
        len(make_stream())
    assert not hasattr(make_stream(), "state_dict")


@pytest.mark.parametrize("num_workers", [0, 3])
def test_micro_batches_follow_a_ramp_from_wherever_the_run_stands(make_stream, num_workers):
    def window_at(consumed: int, ranks: int) -> tuple[int, int]:
        return (4, 4 // ranks) if consumed < 8 else (12, 6 // ranks)

    for start, sizes in ((0, [4, 4, 6, 6, 6]), (4, [4, 6, 6, 6, 6])):
        rows = take(make_stream(start=start, window_at=window_at), 5, num_workers)
        assert [len(batch) for batch in rows] == sizes
        plain = torch.cat(take(make_stream(start=start, micro_batch=1), sum(sizes)))
        assert torch.equal(torch.cat(rows), plain)
        parts = [take(make_stream(start=start, window_at=window_at, rank=rank, size=2), 5) for rank in range(2)]
        for whole, first, second in zip(rows, *parts, strict=True):
            assert torch.equal(whole, torch.cat([first, second]))
