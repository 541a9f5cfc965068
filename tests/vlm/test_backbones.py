"""What a checkpoint says of the tokenizer that its language model reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_stable.vlm import backbones
from lit_stable.vlm.backbones import find_backbone, tokenizer_problems


@pytest.mark.parametrize(
    ("source", "own", "given", "said"),
    [
        ("builtin:python-stdlib", "bytes", "bytes", None),
        ("builtin:python-stdlib", "bytes", "bpe:300", "reads bytes; set it so"),
        ("builtin:python-stdlib", "bpe:300", "bytes", "reads bpe:300; give the tokenizer.json"),
        ("builtin:python-stdlib", "bpe:300", __file__, None),
        ("web_tokens", "bpe:300", "bytes", None),  # prepared by whatever it was
    ],
)
def test_captions_are_in_the_tokens_of_the_language_model(monkeypatch, source, own, given, said):
    recipe = {"data": {"sources": {"text": {"path": source}}, "tokenizer": own}}
    monkeypatch.setattr(backbones, "read_record", lambda path: {"recipe": recipe})
    problems = tokenizer_problems(Path("last.ckpt"), given)
    assert [said in problem for problem in problems] == ([] if said is None else [True])


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
