"""Files that torch loads, written piece by piece."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gpt_run import equal_bits
from torch import Tensor

from lit_stable.callbacks import checkpoint_snapshot
from lit_stable.callbacks.checkpoint_snapshot import Snapshot

ODD = {
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch._neg_view(torch.ones(2)),
    "quantized": torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 3, torch.quint8),
    "sparse": torch.eye(2).to_sparse(),
    "rows": torch.eye(2).to_sparse_csr(),
    "empty": torch.empty(0, 3),
    "a number": torch.tensor(3),
    "expanded": torch.ones(1).expand(3),
    "a piece": torch.arange(6)[2:4],
    "turned": torch.arange(6.0).view(2, 3).t(),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "uint16": torch.arange(3).to(torch.uint16),
    "bool": torch.tensor([True, False]),
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
}


def bytes_of(tensor: Tensor) -> Tensor:
    whole = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    return whole.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def written(tree: Any, path: Path, mmap: bool = False) -> Any:
    Snapshot(tree).write(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return torch.load(path, weights_only=True, mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_whatever_a_tensor_is_torch_loads_it(name: str, mmap: bool, tmp_path: Path) -> None:
    tensor, expected = ODD[name], tmp_path / "torch.pt"
    torch.save({"a": [tensor]}, expected)
    ours, torchs = (
        written({"a": [tensor]}, tmp_path / "ours.pt", mmap)["a"][0],
        torch.load(expected, weights_only=True)["a"][0],
    )
    for kind in (type, lambda t: t.dtype, lambda t: t.layout, lambda t: t.shape, lambda t: t.requires_grad):
        assert kind(ours) == kind(torchs)
    assert torch.equal(bytes_of(ours), bytes_of(torchs))
    if tensor.layout is torch.strided:
        assert ours.stride() == torchs.stride()


@pytest.mark.parametrize("name", ODD)
def test_whatever_a_tensor_is_its_copy_is(name: str) -> None:
    snapshot = Snapshot({"a": [ODD[name]]})
    snapshot.copy_to_host()
    tensor, copied = ODD[name], snapshot.tree()["a"][0]
    for kind in (type, lambda t: t.dtype, lambda t: t.layout, lambda t: t.shape):
        assert kind(copied) == kind(tensor)
    assert torch.equal(bytes_of(tensor), bytes_of(copied))


def test_a_tensor_without_data_stays_one(tmp_path: Path) -> None:
    assert written({"a": torch.empty(2, device="meta")}, tmp_path / "a.pt")["a"].is_meta


def test_a_copy_shares_what_was_shared_and_nothing_else(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    live = {"state_dict": OrderedDict(a=weight, b=weight, row=weight[1]), "numbers": [1, [2]], "pair": (weight[0], "x")}
    live["state_dict"]._metadata = {"": {"version": 1}}
    snapshot = Snapshot(live)
    snapshot.copy_to_host()
    weight += 1
    live["numbers"][1].append(3)
    snapshot.write(tmp_path / "a.pt")
    for copied in (snapshot.tree(), torch.load(tmp_path / "a.pt", weights_only=True)):
        state = copied["state_dict"]
        assert state["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert state["a"].data_ptr() == state["b"].data_ptr()
        assert state["row"].tolist() == [3, 4, 5]
        assert state["row"].untyped_storage().data_ptr() == state["a"].untyped_storage().data_ptr()
        assert (type(state), state._metadata) == (OrderedDict, {"": {"version": 1}})
        assert copied["numbers"] == [1, [2]]
        assert copied["pair"][0].tolist() == [0, 1, 2]
        assert copied["pair"][1] == "x"
    assert len([name for name in zipfile.ZipFile(tmp_path / "a.pt").namelist() if "/data/" in name]) == 1


def test_bytes_that_are_read_as_two_dtypes_are_not_mixed_up(tmp_path: Path) -> None:
    """A file has one dtype for a storage; ``torch.save`` refuses."""
    bits = torch.arange(3.0)
    loaded = written({"float": bits, "int": bits.view(torch.int32)}, tmp_path / "a.pt")
    assert torch.equal(loaded["float"], bits)
    assert torch.equal(loaded["int"], bits.view(torch.int32))


@pytest.mark.parametrize("limit", [zipfile.ZIP64_LIMIT, 100])  # above it a record's head is longer
def test_tensors_begin_where_they_can_be_used_in_place(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    monkeypatch.setattr(checkpoint_snapshot, "_PIECE", 1000)  # so that a tensor has several pieces, and a shorter last
    tree = {f"{n}": torch.arange(float(n)) for n in (1, 7, 25, 1001)}
    loaded = written(tree, tmp_path / "a.pt", mmap=True)
    assert equal_bits(loaded, tree)
    assert [tensor.data_ptr() % 64 for tensor in loaded.values()] == [0, 0, 0, 0]


def test_what_cannot_be_pickled_is_told_before_a_file_is_begun(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        written({"a": lambda: None}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_interrupted_leaves_no_file_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, names = checkpoint_snapshot._write_storage, []

    def interrupt(archive: zipfile.ZipFile, name: str, storage: Any) -> None:
        if names:
            raise KeyboardInterrupt
        names.append(name)
        write(archive, name, storage)

    monkeypatch.setattr(checkpoint_snapshot, "_write_storage", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Snapshot([torch.ones(3), torch.ones(4)]).write(tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []
