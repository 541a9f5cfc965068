from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from text_logger import TextLogger
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import VOCAB, equal_bits, fit
from tiny_recipe import command, write_recipe
from torch import Tensor

from lit_stable.callbacks import Events, SampleText
from lit_stable.callbacks.base import MisconfigurationException


class Letters:
    """A tokenizer of letters."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def sampled(
    folder: Path, *others: Any, tokenizer: Any = None, steps: int = 2, **options: Any
) -> tuple[Any, TextLogger, str]:
    channel, logger = Events(), TextLogger()
    channel.folder = folder

    def start(trainer: Any) -> None:
        trainer.loggers = [logger]

    def give(trainer: Any) -> None:
        trainer.lightning_module.tokenizer = tokenizer

    watches = [Watch("on_train_start", start)]
    sample = SampleText(**{"new_tokens": 5, **options})
    if tokenizer is not None:
        sample.on_fit_start = lambda trainer, module, own=sample.on_fit_start: (give(trainer), own(trainer, module))  # type: ignore[method-assign]
    run = fit(steps=steps, callbacks=(channel, sample, *watches, *others), dropout=0.2)
    path = folder / "samples.txt"
    return run, logger, path.read_text() if path.exists() else ""


def test_texts_reach_the_loggers_and_the_folder(tmp_path: Path) -> None:
    _, logger, file = sampled(tmp_path, tokenizer=Letters(), prompts=["once", "a"])
    assert [(key, step) for key, _, step in logger.texts] == [(f"samples/{i}", s) for s in (1, 2) for i in (0, 1)]
    text = logger.texts[0][1]
    assert text.startswith(Letters().decode(Letters().encode("once")) + "|")
    assert len(text.split("|")[1]) == 5
    assert f"step 1, prompt 0:\n{text}\n\n" in file
    assert file.count("step 2, prompt ") == 2


def test_without_prompts_it_begins_with_the_end_of_a_text(tmp_path: Path) -> None:
    _, logger, _ = sampled(tmp_path, tokenizer=Letters())
    assert [text.split("|")[0] for _, text, _ in logger.texts] == ["a", "a"]


def test_the_run_is_bit_identical(tmp_path: Path) -> None:
    bare = fit(steps=3, dropout=0.2)
    run, _, _ = sampled(tmp_path, prompt_ids=[[1, 2], [3]], temperature=1.0, steps=3)
    assert equal_bits(bare.weights, run.weights)
    assert bare.rows == run.rows


def test_draws_depend_on_the_seed_and_the_step_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompt_ids": [[1, 2]], "temperature": 1.0, "new_tokens": 12}
    texts = [sampled(tmp_path / str(i), **options, seed=i // 2)[1].texts for i in range(3)]
    assert texts[0] == texts[1] != texts[2]


def test_repetition_is_measured(tmp_path: Path) -> None:
    class Stuck(TinyModule):
        def token_logits(self, ids: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.full_like(ids, 3), 8).float()

    channel = Events()
    channel.folder = tmp_path
    sample = SampleText(prompt_ids=[[1], [2, 5]], new_tokens=8, temperature=0.0)
    trainer = quiet_trainer(channel, sample, max_steps=1, log_every_n_steps=1)
    trainer.fit(Stuck(), TinyData())
    assert float(trainer.callback_metrics["stability/sample_repeated_tokens"]) == 1.0
    assert float(trainer.callback_metrics["stability/sample_repeated_ngrams"]) == 4 / 5
    assert "2 5|3 3 3 3 3 3 3 3" in (tmp_path / "samples.txt").read_text()


def test_a_recipe_turns_it_on_with_the_tokenizer_of_its_data(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, stability__sample_text={"every_steps": 3, "prompts": ["the "], "new_tokens": 8})
    done = command("fit", "--config", recipe)
    assert done.code == 0, done.err
    (file,) = tmp_path.glob("runs/*/*/samples.txt")
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("step ")] == ["step 3, prompt 0:", "step 6, prompt 0:"]
    assert sum(line.startswith("the |") for line in lines) == 2


def test_texts_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"GPTModule has no `tokenizer` .* give prompt_ids"):
        sampled(tmp_path, prompts=["a"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompts": ["a"], "prompt_ids": [[1]]}, "prompts and prompt_ids are both given"),
        ({"prompt_ids": [[]]}, r"prompts\[0\] is empty"),
        ({"new_tokens": 1}, r"new_tokens=1\)`: must be at least 2"),
        ({"temperature": -1.0}, "temperature=-1.0: must be 0 or more"),
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MisconfigurationException, match=sentence):
        SampleText(**options)


def test_a_text_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"`SampleText\(prompts\[1\]=''\)`: has no token"):
        sampled(tmp_path, tokenizer=Letters(), prompts=["a", ""])
