from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from lit_stable.callbacks import Progress, ResumingBatches
from lit_stable.callbacks.base import MisconfigurationException


def trainer(samples: int = 0, rank: int = 0, ranks: int = 1, **state: Any) -> Any:
    progress = Progress()
    progress.samples = samples
    for name, value in state.items():
        setattr(progress, name, value)
    strategy = SimpleNamespace(_device_mesh=None)
    return SimpleNamespace(callbacks=[progress], strategy=strategy, world_size=ranks, global_rank=rank)


def read(count: int, of: Any = None, size: int = 10, **options: Any) -> list[list[int]]:
    return list(itertools.islice(ResumingBatches(of or trainer(), size, 2, **options), count))


def test_it_goes_on_where_the_run_stands() -> None:
    straight = read(12)
    assert read(8, trainer(samples=8)) == straight[4:]


def test_each_epoch_holds_every_item_once_in_an_order_of_its_own() -> None:
    epochs = [list(itertools.chain(*read(10)[i : i + 5])) for i in (0, 5)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert read(5, seed=1) != read(5, seed=2)
    assert read(3, shuffle=False) == [[0, 1], [2, 3], [4, 5]]


def test_two_ranks_read_together_what_one_reads() -> None:
    both = [read(4, trainer(rank=rank, ranks=2)) for rank in (0, 1)]
    assert [batch for pair in zip(*both, strict=True) for batch in pair] == read(8)


def test_what_is_dropped_is_left_out_wherever_it_lies() -> None:
    straight = list(itertools.chain(*read(30)))
    kept = straight[:6] + straight[10:]
    assert list(itertools.chain(*read(20, trainer(dropped=[(6, 10)])))) == kept[:40]
    assert list(itertools.chain(*read(5, trainer(samples=8, dropped=[(6, 10)])))) == kept[8:18]


def test_what_is_left_of_an_epoch_comes_in_another_order_and_nothing_twice() -> None:
    straight, again = (list(itertools.chain(*read(10, trainer(reshuffles=r), size=20))) for r in ([], [(6, 5)]))
    assert again[:6] == straight[:6]
    assert again[6:] != straight[6:]
    assert sorted(again) == sorted(straight)
    twice = list(itertools.chain(*read(10, trainer(reshuffles=[(6, 5), (12, 9)]), size=20)))
    assert twice[:12] == again[:12]
    assert sorted(twice) == sorted(straight)
    assert twice[12:] != again[12:]


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"ResumingBatches\(size=0\)"):
        ResumingBatches(trainer(), 0, 2)
    with pytest.raises(MisconfigurationException, match=r"ResumingBatches\(batch_size=0\)"):
        ResumingBatches(trainer(), 2, 0)
