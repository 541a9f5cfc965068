"""Pins the names of ``private_storage_names.py``."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from lit_stable.callbacks import private_storage_names


def test_a_tensor_hands_a_storage_over_to_whoever_pickles_it(tmp_path: Path) -> None:
    met: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            stored = private_storage_names.as_stored(obj)
            met.extend([] if stored is None else [stored])
            return None if stored is None else "here"

    Pickler(io.BytesIO(), 2).dump([torch.ones(3), torch.ones(2).untyped_storage()])
    (storage, *rest), (_, *bare) = met
    assert rest == [torch.float32, torch.FloatStorage, 3]
    assert bare == [torch.uint8, torch.UntypedStorage, 8]
    assert private_storage_names.typed_storage(storage, torch.float32).tolist() == [1, 1, 1]


def test_a_place_in_a_shard_is_what_the_reader_of_shards_looks_up() -> None:
    place = private_storage_names.place_in_shard("__1_0.distcp", 64, 3)
    assert (place.relative_path, place.offset, place.length) == ("__1_0.distcp", 64, 3)
    assert place.transform_descriptors is None
