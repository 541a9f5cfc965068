from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import SaveAtSteps, TinyData, TinyModule, quiet_trainer
from torch.distributed.checkpoint import save

from lit_stable.diagnosis.checkpoint_page import compare, inspect
from lit_stable.diagnosis.checkpoint_tensors import open_checkpoint


def checkpoint(path: Path, weights: dict[str, torch.Tensor], step: int = 100, **state: Any) -> Path:
    optimizer = {"state": {0: state}, "param_groups": [{"eps": 1e-8, "params": [0]}]} if state else None
    torch.save({"state_dict": weights, "global_step": step, "optimizer_states": [optimizer] if optimizer else []}, path)
    return path


def page(path: Path) -> str:
    return inspect(open_checkpoint(path))


def test_a_healthy_checkpoint_of_a_foreign_project(tmp_path: Path) -> None:
    quiet_trainer(SaveAtSteps(tmp_path), max_steps=3).fit(TinyModule(), TinyData())
    shown = page(tmp_path / "micro-3.ckpt")
    assert "step 3; weights: 76 float32; optimizer state: 4 x step, 4 x exp_avg, 4 x exp_avg_sq" in shown
    assert "nothing wrong found" in shown
    assert "net.0.weight" in shown


def test_gains_that_never_moved_are_named(tmp_path: Path) -> None:
    weights = {"norm.weight": torch.ones(8, dtype=torch.bfloat16), "other_norm.weight": 1 + 0.01 * torch.randn(8)}
    shown = page(checkpoint(tmp_path / "a.ckpt", weights))
    assert "1 of 2 norm gains are exactly 1.0 after 100 steps (norm.weight)" in shown


def test_gains_that_decay_has_shrunk_are_named_with_the_rate(tmp_path: Path) -> None:
    well = {"ln_2.weight": torch.linspace(0.5, 1.2, 8), "ln_3.weight": torch.linspace(0.99, 1.01, 8)}
    shrunk = torch.full((8,), (1 - 1e-4 * 0.1) ** 12_000)
    shown = page(checkpoint(tmp_path / "a.ckpt", {"ln_1.weight": shrunk, **well}, step=12_000))
    assert "ln_1.weight: its gains shrank alike, to 0.8869" in shown
    assert shown.count("shrank alike") == 1
    assert "1 - lr x decay = 0.99999" in shown


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_gains_of_a_group_without_decay_shrank_for_another_reason(tmp_path: Path, decay: float) -> None:
    groups = [{"weight_decay": 0.1, "params": [0]}, {"weight_decay": decay, "params": [1]}]
    content = {
        "state_dict": {"w": torch.ones(8, 8), "norm.weight": torch.full((8,), 0.8639)},
        "optimizer_states": [{"state": {}, "param_groups": groups}],
        "lit_stable": {"parameters": [[["w"], ["norm.weight"]]]},
        "global_step": 300,
    }
    torch.save(content, tmp_path / "a.ckpt")
    assert ("norm.weight: its gains shrank alike" in page(tmp_path / "a.ckpt")) == (decay > 0)


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_the_groups_of_a_sharded_checkpoint_are_known_too(tmp_path: Path, decay: float) -> None:
    state = {
        "state_dict": {"norm.weight": torch.full((8,), 0.8639)},
        "optimizer_0": {"param_groups": [{"weight_decay": 0.1, "eps": 1e-8}, {"weight_decay": decay, "eps": 1e-8}]},
    }
    save(state, checkpoint_id=str(tmp_path / "a.ckpt"), no_dist=True)
    meta = {"global_step": 300, "lit_stable": {"parameters": [[["w"], ["norm.weight"]]]}}
    torch.save(meta, tmp_path / "a.ckpt" / "meta.pt")
    assert ("norm.weight: its gains shrank alike" in page(tmp_path / "a.ckpt")) == (decay > 0)


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    weights = {"w": torch.tensor([1.0, torch.nan, torch.inf])}
    assert "w: 2 of its values are not finite" in page(checkpoint(tmp_path / "a.ckpt", weights))


def test_second_moments_that_vanished_are_counted(tmp_path: Path) -> None:
    moments = {"exp_avg": torch.tensor([1e-30, 1.0]), "exp_avg_sq": torch.tensor([0.0, 1.0])}
    shown = page(checkpoint(tmp_path / "a.ckpt", {"w": torch.ones(2)}, step=torch.tensor(7.0), **moments))  # type: ignore[arg-type]
    assert "1 second moments are 0 where the first is not (optimizer 0, parameter 0)" in shown
    assert "50% of second moments have a root below eps=1e-08" in shown


def test_step_counts_that_differ_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    states = {n: {"step": torch.tensor(float(count))} for n, count in enumerate((9, 9, 4))}
    torch.save({"state_dict": {"w": torch.ones(1)}, "optimizer_states": [{"state": states, "param_groups": []}]}, path)
    assert "step counts differ: 9 for most, another for 1 tensors (optimizer 0, parameter 2)" in page(path)


def test_two_checkpoints_are_compared_by_relative_change(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a.ckpt", {"a": torch.ones(4), "b": torch.ones(4), "gone": torch.ones(1)}, 1)
    second = checkpoint(tmp_path / "b.ckpt", {"a": torch.ones(4), "b": 1.5 * torch.ones(4), "new": torch.ones(1)}, 2)
    lines = compare(open_checkpoint(first), open_checkpoint(second)).splitlines()
    assert "gone: only in the first" in lines[1]
    assert "new: only in the second" in lines[2]
    assert lines[3].startswith("2 tensors in both, 1 of them unchanged")
    assert [line.split() for line in lines[4:]] == [["0.5", "b"], ["0", "a"]]


@pytest.mark.parametrize("lines", [inspect, compare])
def test_a_flipped_bit_is_the_first_finding(tmp_path: Path, lines: Any) -> None:
    whole, flipped = tmp_path / "whole.ckpt", tmp_path / "flipped.ckpt"
    weight = torch.full((64,), 0.625)
    content = bytearray(checkpoint(whole, {"w": weight}).read_bytes())
    content[content.index(weight.numpy().tobytes()) + 3] ^= 0x40
    flipped.write_bytes(content)
    told = r"\n  ! \S+flipped\.ckpt is damaged: its record \S+ does not match its checksum; use another checkpoint\n"
    opened = [open_checkpoint(path) for path in (whole, flipped)]
    shown = lines(*opened) if lines is compare else lines(opened[1])
    assert len(re.findall(told, shown)) == 1
    assert "damaged" not in (lines(opened[0], opened[0]) if lines is compare else lines(opened[0]))


def test_numbers_of_8_bits_are_measured(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.ckpt", {"w": torch.full((4,), 0.5).to(torch.float8_e4m3fn)})
    assert page(path).splitlines()[-1].split() == ["w", "0.5", "0.5", "float8_e4m3fn", "4"]


def test_refuses_what_is_no_checkpoint_and_what_may_run_code(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        open_checkpoint(tmp_path / "no.ckpt")
    with pytest.raises(ValueError, match=r"without `.metadata`"):
        open_checkpoint(tmp_path)
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(ValueError, match=r"cannot be read as a checkpoint|needs more than tensors"):
        open_checkpoint(tmp_path / "text")
    (tmp_path / "empty.ckpt").touch()
    with pytest.raises(ValueError, match=r"empty\.ckpt: cannot be read as a checkpoint \(it is empty\)\.$"):
        open_checkpoint(tmp_path / "empty.ckpt")
    torch.save({"state_dict": torch.ones(3)}, tmp_path / "tensor.ckpt")
    with pytest.raises(
        ValueError, match=r"tensor\.ckpt: holds no mappings under state_dict and optimizer_states; give"
    ):
        open_checkpoint(tmp_path / "tensor.ckpt")
    whole = checkpoint(tmp_path / "whole.ckpt", {"w": torch.ones(1)}).read_bytes()
    (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"half\.ckpt: cannot be read as a checkpoint \([^.]*\)\.$"):
        open_checkpoint(tmp_path / "half.ckpt")
    torch.save({"state_dict": {"w": torch.ones(1)}, "hyper_parameters": Path("x")}, tmp_path / "objects.ckpt")
    with pytest.raises(ValueError, match="add --trust true"):
        open_checkpoint(tmp_path / "objects.ckpt")
    assert open_checkpoint(tmp_path / "objects.ckpt", trust=True).entries[0].name == "w"
