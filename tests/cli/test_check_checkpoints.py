from __future__ import annotations

from pathlib import Path

import pytest
from tiny_recipe import command, write_recipe


def test_how_many_stay_and_their_bytes_are_told(tmp_path: Path) -> None:
    kept = {"keep_last": 3, "keep_every": 100, "milestones": True, "mirror": "/else/where"}
    recipe = write_recipe(tmp_path, trainer__max_steps=1000, checkpoints=kept)
    (line,) = [line for line in command("check", "--config", recipe).out.splitlines() if "checkpoints kept" in line]
    assert line.startswith("checkpoints kept: at most 15 (last 3, best 1, every 100 steps 10, milestones 1), ")
    assert line.endswith(" together; all of them in /else/where")
    assert "), 90.8 KiB each, 1.33 MiB together" in line


def test_those_that_the_ladder_may_go_back_to_count(tmp_path: Path) -> None:
    ladder = [{"do": "rewind", "max_times": 2}, {"do": "rewind", "to": 500}, {"do": "stop"}]
    for rungs, part in ((ladder, "last 3, best 1, healthy 5"), (ladder[2:], "last 3, best 1")):
        recipe = write_recipe(tmp_path, stability__recovery={"rungs": rungs, "keep": 4}, checkpoints={"keep_last": 3})
        page = command("check", "--config", recipe).out
        assert f"({part}), " in next(line for line in page.splitlines() if "checkpoints kept" in line)


def test_what_rewinds_leave_behind_is_told(tmp_path: Path) -> None:
    ladder = [{"do": "rewind", "max_times": 2}, {"do": "rewind", "to": 500, "max_times": 3}, {"do": "stop"}]
    for rungs, more, part in (
        (ladder, {}, "; up to 5 rewinds leave up to 5 more each, as NAME.branch-N, "),
        (ladder, {"action": "log"}, None),
        (ladder[2:], {}, None),
    ):
        recipe = write_recipe(tmp_path, stability__recovery={"rungs": rungs, "keep": 3, **more})
        page = (done := command("check", "--config", recipe)).out
        assert done.code == 0, done.err
        (line,) = [line for line in page.splitlines() if "checkpoints kept" in line]
        assert (part or "together") in line
        assert ("branch" in line) is (part is not None)
    size, unit = line.split("), ")[1].split(",")[0].split()[:2]
    told = command("check", "--config", write_recipe(tmp_path, stability__recovery={"rungs": ladder, "keep": 3})).out
    number, other = told.split("NAME.branch-N, ")[1].split()[:2]
    scale = {"KiB": 2**10, "MiB": 2**20}
    assert float(number) * scale[other] == pytest.approx(25 * float(size) * scale[unit], rel=0.02)


def test_how_often_the_run_validates_and_saves_is_told_with_how_many_times(tmp_path: Path) -> None:
    options = {"validate_every": "2_000 tokens", "checkpoints__every_steps": 10}
    recipe = write_recipe(tmp_path, data__global_batch=4, data__sequence_length=32, trainer__max_steps=45, **options)
    # 128 tokens a step: 5,760 in all.
    assert (
        "\nvalidation every 2,000 tokens (2 times), a checkpoint every 10 steps (4 times)\n"
        in command("check", "--config", recipe).out
    )


def test_a_checkpoint_is_as_large_as_it_says(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model__gpt__d_model=128, model__gpt__n_layer=2)
    said = next(line for line in command("check", "--config", recipe).out.splitlines() if "checkpoints kept" in line)
    number, unit = said.split("), ")[1].split(",")[0].split()[:2]
    assert command("fit", "--config", recipe, "--trainer.max_steps", "2").code == 0
    size = (tmp_path / "runs" / "tiny" / "0001" / "checkpoints" / "step-00000002.ckpt").stat().st_size
    scale = {"KiB": 2**10, "MiB": 2**20, "kB": 1e3, "MB": 1e6}[unit]
    assert 0.95 < float(number) * scale / size < 1.05
