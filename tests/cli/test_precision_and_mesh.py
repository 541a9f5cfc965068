"""Precision, loss scale and mesh as a user types them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_recipe import Done, command, write_recipe


def fit(*words: Any) -> Done:
    done = command("fit", *words)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp16 needs no clipping to be tried."""
    return write_recipe(tmp_path_factory.mktemp("precision"), stability__grad_clip=None, trainer__max_steps=3)


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (["--trainer.precision", "16-mixed"], "16-mixed"),
        (["--trainer.precision=16-true", "--trainer.strategy=fsdp2"], "16-true"),
    ],
)
def test_fp16_trains_on_a_cpu_by_name_and_logs_its_scale(recipe: Path, words: list[str], precision: str) -> None:
    done = fit("--config", recipe, *words, "--loss_scale.init", "512", "--loss_scale.window", "2")
    assert f"precision {precision}\nloss scale: LossScale(init=512.0, window=2)\n" in done.out
    (path,) = Path(re.search(r"^logs +(\S+)$", done.out, re.MULTILINE)[1]).glob("csv-*/metrics.csv")  # type: ignore[index]
    with path.open() as file:
        scales = [row["loss_scale"] for row in csv.DictReader(file) if row["loss_scale"]]
    assert scales == ["512.0", "512.0", "1024.0"]


def test_a_run_leaves_fp16_in_mid_run_and_says_what_becomes_of_the_scale(recipe: Path) -> None:
    named = ["--config", recipe, "--run.name", "switch"]
    fit(*named, "--trainer.precision", "16-mixed", "--loss_scale.init", "1024")
    done = fit(*named, "--trainer.precision", "bf16-mixed", "--trainer.max_steps", "4", "--resume", "auto")
    assert "loss scale: 1024 of the checkpoint dropped; bf16-mixed needs none" in done.out
    assert "trainer.precision: 16-mixed -> bf16-mixed" in done.out
    done = fit(*named, "--trainer.precision", "32-true", "--trainer.max_steps", "5", "--resume", "auto")
    assert "loss scale" not in done.out
    assert re.findall(r"^step (\d+)/5", done.out, re.MULTILINE) == ["5"]


def test_bf16_true_is_warned_of_on_the_screen(recipe: Path) -> None:
    with pytest.warns(UserWarning, match="precision=bf16-true: weights and Adam's moments are stored in bf16"):
        done = fit("--config", recipe, "--trainer.precision", "bf16-true")
    assert "moments {'bfloat16'" in done.out


def test_the_stored_recipe_holds_the_mesh_and_the_policy(recipe: Path) -> None:
    done = fit("--config", recipe, "--loss_scale.hysteresis", "2")
    folder = Path(re.search(r"^logs +(\S+)$", done.out, re.MULTILINE)[1])  # type: ignore[index]
    stored = yaml.safe_load((folder / "recipe-01.yaml").read_text())
    assert stored["mesh"] == {"tensor_parallel": 1, "replicate": 1, "reshard_after_forward": None}
    policy = {"init": 65536.0, "window": 2000, "hysteresis": 2, "floor": 1.0, "threshold": None}
    assert stored["loss_scale"] == policy


def test_the_mesh_is_named_in_the_first_lines(recipe: Path) -> None:
    done = fit("--config", recipe, "--trainer.strategy", "fsdp2", "--trainer.max_steps", "1")
    assert "strategy FSDP2Strategy (1 rank); precision 32-true" in done.out


def test_switches_of_sharding_and_saving_leave_a_trace_in_the_first_lines(recipe: Path) -> None:
    words = ["--mesh.reshard_after_forward", "true", "--checkpoints.in_background", "true"]
    done = fit("--config", recipe, "--trainer.strategy", "fsdp2", "--trainer.max_steps", "1", *words)
    assert "strategy FSDP2Strategy (1 rank; reshard_after_forward=True); precision" in done.out
    assert "; SafeCheckpoints(in_background=True);" in done.out
    assert done.out.index("\nsaved ") < done.out.index("\ncheckpoint, last"), "the table names what is on disk"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mesh.tensor_parallel", "0"], "mesh.tensor_parallel=0: must be at least 1."),
        (
            ["--mesh.tensor_parallel", "2"],
            "mesh.tensor_parallel=2: strategy auto does not read it; set trainer.strategy",
        ),
        (
            ["--mesh.tensor_parallel", "4", "--trainer.strategy", "fsdp2"],
            "model.gpt.n_head=2: must be a multiple of mesh.tensor_parallel=4; nearest legal: 4.",
        ),
        (["--loss_scale.floor", "-1"], "loss_scale.floor=-1.0: must be a finite number above 0."),
        (["--loss_scale.init", "0.5"], "loss_scale.init=0.5: must be finite and at least loss_scale.floor=1.0."),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(recipe: Path, words: list[str], sentence: str) -> None:
    done = command("check", "--config", recipe, *words)
    assert done.code == 2
    assert sentence in done.err


def test_the_problems_of_mesh_policy_and_precision_come_together(recipe: Path) -> None:
    words = ["--mesh.replicate", "2", "--loss_scale.window", "0", "--trainer.precision", "16-true"]
    done = command("check", "--config", recipe, *words)
    assert len(done.err.splitlines()) == 3


def test_ranks_that_cannot_be_laid_out_are_one_sentence(recipe: Path) -> None:
    words = ["--trainer.strategy", "fsdp2", "--mesh.replicate", "2"]
    done = command("fit", "--config", recipe, *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "1 ranks: must be a multiple of mesh.tensor_parallel=1 x mesh.replicate=2 = 2; nearest legal: 2." in done.err


def test_check_plans_for_a_mesh(recipe: Path) -> None:
    vocabulary = ["--model.gpt.vocab_size", "258"]  # even, for two ranks
    words = ["--config", recipe, "--trainer.strategy", "fsdp2", *vocabulary, "--devices"]
    assert "2 x 4 data-parallel ranks = 8" in command("check", *words, "4").err  # too many for a batch of 4
    assert "3 ranks: must be a multiple of" in command("check", *words, "3", "--mesh.tensor_parallel", "2").err
    split = command("check", *words, "4", "--mesh.tensor_parallel", "2", "--mesh.replicate", "2")
    assert split.code == 0, split.err
    assert "as 1 micro-batches of 2 on each of 2 data-parallel ranks" in split.out
    parameters = 7744 + 16
    assert f"optimizer states {8 * parameters / 2 / 1024:.3g} KiB" in split.out  # one of two copies, over two ranks


def test_check_counts_the_bytes_of_a_precision(recipe: Path) -> None:
    def memory(precision: str) -> str:
        out = command("check", "--config", recipe, "--trainer.precision", precision).out
        return next(line for line in out.splitlines() if line.startswith("memory per device"))

    weights = {p: re.search(r"weights (\S+ \w+)", memory(p))[1] for p in ("32-true", "16-mixed", "bf16-true")}  # type: ignore[index]
    activations = {p: re.search(r"activations (\S+ \w+)", memory(p))[1] for p in weights}  # type: ignore[index]
    assert weights == {"32-true": "30.2 KiB", "16-mixed": "30.2 KiB", "bf16-true": "15.1 KiB"}
    assert activations == {"32-true": "64 KiB", "16-mixed": "32 KiB", "bf16-true": "32 KiB"}


def test_a_strategy_given_as_a_class_takes_its_own_mesh(recipe: Path) -> None:
    strategy = "{class_path: lit_stable.strategies.fsdp2.FSDP2Strategy, init_args: {replicate: 1}}"
    done = fit("--config", recipe, "--trainer.strategy", strategy, "--trainer.precision", "16-mixed")
    assert "strategy FSDP2Strategy (1 rank); precision 16-mixed" in done.out
