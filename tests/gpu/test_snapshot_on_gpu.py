"""Checkpoints of tensors that lie on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_stable.callbacks.checkpoint_snapshot import Snapshot

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("in_background", [False, True])
def test_the_file_holds_what_there_was(in_background: bool, tmp_path: Path) -> None:
    """The copy is made on the stream of training: what that was asked for before is in it, and nothing after."""
    weight = torch.zeros(5_000_001, device="cuda")  # two pieces
    moments = {"exp_avg": torch.ones(7, device="cuda", dtype=torch.bfloat16), "step": torch.tensor(3.0)}
    for _ in range(3):  # the second and third copy lie in memory that the one before has left
        torch.cuda._sleep(10_000_000)
        weight += 1
        expected = weight.clone()
        snapshot = Snapshot({"weight": weight, "tied": weight[10:], "moments": moments})
        if in_background:
            snapshot.copy_to_host()
            weight += 5
        snapshot.write(tmp_path / "a.pt")
        found = torch.load(tmp_path / "a.pt", weights_only=True)
        assert torch.equal(found["weight"], expected.cpu())
        assert found["tied"].untyped_storage().data_ptr() == found["weight"].untyped_storage().data_ptr()
        assert found["moments"]["exp_avg"].tolist() == [1] * 7
        assert found["moments"]["step"] == 3


def test_what_is_copied_is_page_locked_and_the_rest_on_the_host_is_not_kept() -> None:
    weight, step = torch.ones(3, device="cuda"), torch.tensor(2.0)
    snapshot = Snapshot({"weight": weight, "step": step})
    snapshot.copy_to_host()
    copied = snapshot.tree()
    assert copied["weight"].is_pinned()
    assert copied["weight"].tolist() == [1, 1, 1]
    assert copied["step"].data_ptr() != step.data_ptr()
