"""`lit-stable export CKPT --to hf` and `lit-stable import FOLDER`: models of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from lit_stable.cli.checkpoint_argument import CHECKPOINT, add_root, named_checkpoint
from lit_stable.weights.families import FamilyName


def run_export(argv: Sequence[str]) -> int:
    """Parse the arguments of ``export``, write the folder and say what is in it; 1 when compared logits differ."""
    parser = ArgumentParser(
        prog="lit-stable export",
        description="Write the model of a checkpoint as a folder of transformers: GPT-2, OPT, BLOOM or Llama.",
    )
    parser.add_argument("checkpoint", type=str, help=CHECKPOINT)
    parser.add_argument("--to", type=Literal["hf"], required=True, help="hf: Hugging Face transformers.")
    parser.add_argument("--out", type=Path, required=True, help="Folder to write.")
    parser.add_argument(
        "--family", type=FamilyName | None, default=None, help="As what; by default what its positions point to."
    )
    parser.add_argument("--tokenizer", type=Path | None, default=None, help="A tokenizer.json instead of the run's.")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="Compare logits in transformers, which must be there; exit 1 when they are not equal.",
    )
    add_root(parser)
    arguments = parser.parse_args(list(argv))
    path = named_checkpoint(arguments.checkpoint, arguments.root)

    from lit_stable.weights.exchange import compare_logits, export_to_hf  # late: it takes seconds
    from lit_stable.weights.tokenizer_of_run import tokenizer_if_known

    tokenizer, notes = tokenizer_if_known(path, arguments.tokenizer)
    print("\n".join([*export_to_hf(path, arguments.out, arguments.family, tokenizer), *notes]))
    if not arguments.compare:
        return 0
    found = compare_logits(path, arguments.out)
    print(f"logits: differ by {found.largest:.2g} at most; the largest is {found.of:.3g}")
    if not found.equal:
        print(f"{arguments.out}: is not the same model; more than 1e-5 of the largest logit is no rounding.")
    return 0 if found.equal else 1


def run_import(argv: Sequence[str]) -> None:
    """Parse the arguments of ``import``, write the checkpoint and its recipe, and say what they are."""
    parser = ArgumentParser(
        prog="lit-stable import",
        description="Write a checkpoint of weights, and the recipe of its model, from a folder of transformers.",
    )
    parser.add_argument("folder", type=Path, help="With config.json and weights: GPT-2, OPT, BLOOM or Llama.")
    parser.add_argument("--out", type=Path, required=True, help="Checkpoint file to write; the recipe lies beside it.")
    arguments = parser.parse_args(list(argv))

    from lit_stable.weights.exchange import import_from_hf  # late: it takes seconds

    print("\n".join(import_from_hf(arguments.folder, arguments.out)))
