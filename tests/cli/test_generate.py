"""`lit-stable generate`: the same tokens as the model itself, as text or ids."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tiny_recipe import command, write_recipe

from lit_stable.data.tokenizer import make_tokenizer
from lit_stable.model.generate import generate
from lit_stable.weights.stored_model import build_model, open_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    recipe = write_recipe(tmp_path_factory.mktemp("generate"))
    assert command("fit", "--config", recipe, "--trainer.max_steps", "3").code == 0
    return recipe.parent / "runs" / "tiny" / "0001" / "checkpoints" / "step-00000003.ckpt"


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "seed": 3}])
def test_text_and_ids_are_what_the_model_writes(checkpoint, options):
    tokenizer = make_tokenizer("bytes", [])
    prompts = [tokenizer.encode("the of and"), tokenizer.encode("he")]
    gpt = build_model(open_model(checkpoint))
    new = generate(gpt, prompts, 12, stop_id=tokenizer.eot_id, **options)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = command("generate", checkpoint, "--prompt", "the of and", "he", "--new_tokens", "12", *words)
    assert done.code == 0, done.err
    assert done.out == "".join(tokenizer.decode([*p, *n]) + "\n" for p, n in zip(prompts, new, strict=True))
    ids = command("generate", checkpoint, "--ids", str(prompts[0]), "--new_tokens", "12", *words)
    alone = generate(gpt, prompts[:1], 12, **options)[0]
    assert ast.literal_eval(ids.out) == [*prompts[0], *alone]


def test_draws_follow_the_seed(checkpoint):
    outs = [command("generate", checkpoint, "--ids", "[65]", "--seed", seed).out for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "give one of --prompt and --ids"),
        (("--prompt", "a", "--ids", "[1]"), "give one of --prompt and --ids"),
        (("--ids", "[257]"), "token 257: "),
        (("--ids", "[1]", "--temperature", "-1"), "temperature=-1.0: must be 0 or more"),
        (("--ids", "[1]", "--device", "cuda:99"), "device=cuda:99: is not here"),
        (("--prompt", "a", "--tokenizer", "none.json"), "tokenizer=none.json: no such file"),
    ],
)
def test_what_cannot_be_done_is_refused(checkpoint, words, text):
    done = command("generate", checkpoint, *words)
    assert done.code == 2
    assert text in done.err


def test_a_checkpoint_that_names_no_run_is_asked_for_a_tokenizer(checkpoint, tmp_path):
    from lit_stable.weights.stored_model import write_weights

    stored = open_model(checkpoint)
    write_weights(tmp_path / "bare.ckpt", stored.config, stored.weights())
    done = command("generate", tmp_path / "bare.ckpt", "--prompt", "a")
    assert (done.code, "give --tokenizer PATH" in done.err) == (2, True)
    tokenizer = tmp_path / "tokenizer.json"
    make_tokenizer("bytes", []).save(tokenizer)
    words = ("--prompt", "a", "--new_tokens", "3", "--temperature", "0")
    given = command("generate", tmp_path / "bare.ckpt", *words, "--tokenizer", tokenizer)
    assert given.out == command("generate", checkpoint, *words).out
    assert command("generate", "last", "--ids", "[1]").err.startswith("lit-stable generate: checkpoint=last: of which")
