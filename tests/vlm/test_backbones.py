"""What a checkpoint says of the tokenizer that its language model reads."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lit_stable.data.prepare import prepare
from lit_stable.vlm import backbones
from lit_stable.vlm.backbones import find_backbone, tokenizer_problems


def recipe_of(source: str, tokenizer: str) -> dict[str, Any]:
    """What a resolved recipe says of its data, and that it has no callbacks."""
    data = {"sources": {"text": {"path": source}}, "tokenizer": tokenizer, "sequence_length": 8, "micro_batch": 1}
    return {"data": {**data, "global_batch": 1}, "stability": {}, "trainer": {"callbacks": []}}


@pytest.fixture
def read_by_the_language_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda recipe: monkeypatch.setattr(backbones, "read_record", lambda path: deepcopy({"recipe": recipe}))


@pytest.mark.parametrize(
    ("source", "own", "given", "said"),
    [
        ("builtin:python-stdlib", "bytes", "bytes", None),
        (
            "builtin:python-stdlib",
            "bytes",
            "bpe:300",
            "and last.ckpt reads bytes; set it so",
        ),
        ("lost_tokens", "bytes", "bytes", None),  # prepared by whatever it was
        ("lost_tokens", "bytes", "bpe:300", "is trained on the captions, .*give the tokenizer.json beside"),
    ],
)
def test_what_is_trained_on_captions_is_no_language_models(read_by_the_language_model, source, own, given, said):
    read_by_the_language_model(recipe_of(source, own))
    problems = tokenizer_problems(Path("last.ckpt"), given)
    assert [re.search(said, problem) is not None for problem in problems] == ([] if said is None else [True])


def test_captions_are_in_the_tokens_of_the_stores_that_the_language_model_read(read_by_the_language_model, tmp_path):
    text, stores = tmp_path / "text.txt", tmp_path / "stores"
    text.write_text("\n\n".join(f"the {n} of all of them, and of {n * n}" for n in range(40)))
    prepare([text], stores, "bpe:300", 0.1, "\n\n", report=lambda line: None)
    read_by_the_language_model(recipe_of(str(stores), "bytes"))  # which is of built-in sources and says nothing here
    assert tokenizer_problems(Path("last.ckpt"), str(stores / "tokenizer.json")) == []
    (problem,) = tokenizer_problems(Path("last.ckpt"), "bytes")
    assert re.search(r"^data.tokenizer=bytes \(sha256 \w{12}\): .* reads another tokenizer \(sha256 \w{12}\)", problem)
    given = re.search(r"give (.*)\.$", problem)[1]
    assert tokenizer_problems(Path("last.ckpt"), given) == []


def test_a_run_is_found_by_name_with_its_newest_checkpoint(tmp_path):
    for number, steps in (("0001", (5, 20)), ("0002", (10,)), ("0003", ())):
        (folder := tmp_path / "language" / number / "checkpoints").mkdir(parents=True)
        for step in steps:
            (folder / f"step-{step:08}.ckpt").touch()
    runs = tmp_path / "language"
    assert find_backbone("language", tmp_path, "k") == runs / "0002" / "checkpoints" / "step-00000010.ckpt"
    assert find_backbone("language@20", tmp_path, "k") == runs / "0001" / "checkpoints" / "step-00000020.ckpt"
    assert find_backbone(str(runs / "0001"), tmp_path, "k").name == "step-00000020.ckpt"
    with pytest.raises(
        ValueError, match=r"^k=other: neither a checkpoint nor a run under .*fit --config hf_vlm/other`"
    ):
        find_backbone("other", tmp_path, "k")
