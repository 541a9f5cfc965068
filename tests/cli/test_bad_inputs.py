"""What nobody means to type: one sentence, exit code 1 or 2, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_recipe import command, write_recipe

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.weights.stored_model import write_weights

HUGE = "9" * 25
SMALL = GPTConfig(vocab_size=257, n_layer=1, n_head=2, d_model=8, max_length=16)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    write_weights(path, SMALL, {name: p.detach() for name, p in GPT(SMALL).named_parameters() if name != "head.weight"})
    return path


def is_refused(*words: str | Path, sentence: str, code: int = 2) -> None:
    """In one line."""
    before = sorted(Path().iterdir())
    done = command(*words)
    assert (done.code, len(done.err.splitlines())) == (code, 1), done.err
    assert sentence in done.err
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("model.gpt.n_layer", "must be at most 10,000."),
        ("model.gpt.vocab_size", "must be at most 100,000,000."),
        ("model.gpt.max_length", "must be at most 100,000,000."),
        ("data.global_batch", "must be at most 100,000,000."),
        ("data.sequence_length", "must be at most 100,000,000."),
        ("trainer.max_steps", "must be at most 10,000,000,000."),
        ("validate_every", "must be at most"),
        ("checkpoints.every_steps", "must be at most"),
    ],
)
def test_numbers_that_no_run_has(tmp_path: Path, key: str, sentence: str) -> None:
    is_refused("check", "--config", write_recipe(tmp_path), f"--{key}", HUGE, sentence=sentence)


def test_numbers_of_devices(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    is_refused("check", "--config", recipe, "--devices", "-1", sentence="devices=-1: must be at least 1, or null")
    is_refused("fit", "--config", recipe, "--trainer.devices", "-1", sentence="should be an int > 0")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: &a {gpt: *a}\n", "r.yaml: model.gpt: holds itself, by an alias; write out what it shall hold."),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", "r.yaml: is nested without end; take out what is within itself."),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)),
            "r.yaml: holds more than 100,000 values; take out aliases of what holds aliases.",
        ),
    ],
    ids=["alias_of_itself", "nested", "aliases_of_aliases"],
)
def test_recipes_without_end(text: str, sentence: str) -> None:
    Path("r.yaml").write_text(text)
    is_refused("check", "--config", "r.yaml", sentence=sentence)


def test_a_key_that_a_merge_brings_in_has_a_line(tmp_path: Path) -> None:
    Path("r.yaml").write_text("<<: {config: x, base: 3}\n")
    assert "r.yaml:1: config: is for the command line" in command("check", "--config", "r.yaml").err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generate", "a.ckpt", "--ids", "[1]", "--new_tokens", HUGE], "must be at most 100,000,000"),
        (["generate", "a.ckpt", "--ids", "[1]", "--temperature", "1e-320"], "give 0 for the most likely token."),
        (["generate", "a.ckpt", "--ids", "[1]", "--device", "meta"], "device=meta: computes nothing; name another"),
        (["inspect", "a.ckpt", "--lines", "-1"], "lines=-1: must be 0 or more; 0 lists all."),
        (["import", "hf", "--out", "."], "out=.: exists already, and nothing is written over; name another."),
        (
            ["import", "hf", "--out", "w.yaml"],
            "out=w.yaml: is the name that its recipe gets; name a checkpoint",
        ),
        (["replay", ".", "--step", "1", "--worst", "-1"], "worst=-1: must be 0 or more."),
        (["replay", ".", "--step", HUGE], "no run has so many; give one of its steps."),
        (["dump-batch", ".", "--step", HUGE], "no run has so many; give one of its steps."),
        (["prepare", "a.ckpt", "--tokenizer", f"bpe:{HUGE}", "--out", "p"], "the size must be at most 2,147,483,648."),
        (
            ["prepare", "a.ckpt", "--tokenizer", "bpe:\u00b2\u2075\u2077", "--out", "p"],
            "must be an integer of at",
        ),
        (
            ["prepare", "a.ckpt", "--tokenizer", "bytes", "--out", "."],
            "out=.: exists already; name a folder that is",
        ),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_arguments_out_of_all_range(checkpoint: Path, words: list[str], sentence: str) -> None:
    is_refused(*words, sentence=sentence)


def test_a_name_that_is_too_long_is_said(checkpoint: Path) -> None:
    for words in (["inspect", "x" * 300], ["average", "a.ckpt", "a.ckpt", "--out", "x" * 300]):
        is_refused(*words, sentence=": cannot be used (File name too long); name another, or mend that.", code=1)


def test_what_prepare_has_begun_is_no_text_when_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    parts = tmp_path / "store.unfinished" / "parts"
    parts.mkdir(parents=True)
    (parts / "notes.txt").write_text("left by a process that was killed")
    done = command("prepare", ".", "**/*", "--tokenizer", "bytes", "--validation_fraction", "0", "--out", "store")
    assert done.code == 0, done.err
    assert "in 2 documents" in done.out
