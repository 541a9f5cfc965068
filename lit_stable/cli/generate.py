"""`lit-stable generate CKPT --prompt TEXT`: what a checkpoint's model writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from lit_stable.cli.checkpoint_argument import CHECKPOINT, add_root, named_checkpoint

if TYPE_CHECKING:
    from lit_stable.data.tokenizer import Tokenizer
    from lit_stable.weights.stored_model import StoredModel


def run_generate(argv: Sequence[str]) -> None:
    """Parse the arguments of ``generate`` and print each prompt with what follows it."""
    parser = ArgumentParser(
        prog="lit-stable generate", description="Continue prompts with the model of a checkpoint, in fp32."
    )
    parser.add_argument("checkpoint", type=str, help=CHECKPOINT)
    parser.add_argument("--prompt", nargs="+", type=str, default=[], help="Texts, by the tokenizer of the run.")
    parser.add_argument("--ids", type=list[int], default=[], help="A prompt as token ids, [1, 2, 3]; ids are printed.")
    parser.add_argument("--new_tokens", type=int, default=100, help="Tokens to add; fewer where the text ends.")
    parser.add_argument("--temperature", type=float, default=1.0, help="Divides the logits; 0: the most likely token.")
    parser.add_argument("--top_k", type=int | None, default=None, help="Draw among so many; null: among all.")
    parser.add_argument("--seed", type=int, default=0, help="Of the draws.")
    parser.add_argument("--tokenizer", type=Path | None, default=None, help="A tokenizer.json instead of the run's.")
    parser.add_argument("--device", type=str, default="cpu", help="As torch names it: cpu, cuda, cuda:1.")
    add_root(parser)
    arguments = parser.parse_args(list(argv))
    if bool(arguments.prompt) == bool(arguments.ids):
        raise ValueError(f"prompt={arguments.prompt}, ids={arguments.ids}: give one of --prompt and --ids.")
    path = named_checkpoint(arguments.checkpoint, arguments.root)

    from lit_stable.devices.named_device import named_device  # late: it takes seconds
    from lit_stable.model.generate import generate
    from lit_stable.weights.stored_model import build_model, open_model
    from lit_stable.weights.tokenizer_of_run import find_tokenizer

    stored = open_model(path)
    tokenizer = None if arguments.ids else find_tokenizer(stored.record, arguments.tokenizer)
    prompts = [arguments.ids] if tokenizer is None else [tokenizer.encode(text) for text in arguments.prompt]
    _refuse_unknown(prompts, stored)
    new = generate(
        build_model(stored, named_device(arguments.device)),
        prompts,
        arguments.new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop_id=None if tokenizer is None else tokenizer.eot_id,
        eot_id=_end_of_document(stored, tokenizer, arguments.tokenizer),
    )
    for prompt, continuation in zip(prompts, new, strict=True):
        print(_shown([*prompt, *continuation], tokenizer))


def _end_of_document(stored: StoredModel, tokenizer: Tokenizer | None, given: Path | None) -> int | None:
    """What ends a document, for a model that must know."""
    config = stored.config
    if not config.document_mask or config.document_separator is not None:
        return None
    from lit_stable.weights.tokenizer_of_run import find_tokenizer

    return (tokenizer or find_tokenizer(stored.record, given)).eot_id


def _shown(ids: list[int], tokenizer: Tokenizer | None) -> str:
    return str(ids) if tokenizer is None else tokenizer.decode(ids)


def _refuse_unknown(prompts: Sequence[Sequence[int]], stored: StoredModel) -> None:
    size = stored.config.vocab_size
    unknown = [token for prompt in prompts for token in prompt if not 0 <= token < size]
    if unknown:
        raise ValueError(
            f"token {unknown[0]}: {stored.path} knows ids below {size}; give the tokenizer that it was trained with."
        )
