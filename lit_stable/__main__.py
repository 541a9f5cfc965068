"""The ``lit-stable`` command: help and version at once, everything else after the imports that it needs."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

# One line each; the options of a subcommand are listed by its own --help.
SUBCOMMANDS = {
    "fit": "train a model from a recipe, or go on with a run",
    "validate": "compute the losses of a checkpoint over a sample of the validation sets",
    "test": "compute the losses of a checkpoint over every window of the validation sets",
    "prepare": "turn text, JSON lines, Parquet or data sets into a folder of token shards",
    "diagnose": "find spikes, slow divergence and more in the log of any run, and say what to try",
    "inspect": "look into a checkpoint, or compare two",
    "dump-batch": "print the samples that a run read at a step, with their sources and text",
    "replay": "take a step of a run again: is it the same, which module's output surged, which samples were worst",
    "ctl": "give an order to a run under way: save, stop, validate, or another learning rate",
    "recipes": "list the shipped recipes, with what each is",
    "runs": "draw the tree of runs: where each left its parent, and what it does otherwise",
    "export": "write the model of a checkpoint as a folder of Hugging Face transformers",
    "import": "write a checkpoint and its recipe from a folder of Hugging Face transformers",
    "caption": "let the model of a checkpoint describe images",
    "generate": "let the model of a checkpoint continue a text",
    "average": "write the mean of the weights of several checkpoints",
    "check": "resolve a recipe without training: problems, parameters, memory, schedule, stability features",
    "check-devices": "test every GPU, and under torchrun what they send each other; names the bad one",
}

_HELP = """\
usage: lit-stable SUBCOMMAND [options]
       lit-stable --help | --version

Train language models that stay stable, from recipes.

subcommands:
{subcommands}

  `lit-stable SUBCOMMAND --help` lists the options of one.

recipes:
  --config takes a YAML file or the name of a shipped recipe, as in `--config quickstart`; several are merged in order,
  and options on the command line win. `lit-stable recipes` lists the shipped ones, which lie in the folder recipes/ of
  the source and of the package.

examples:
  lit-stable fit --config quickstart
  lit-stable fit --config quickstart --config stability/grad_clip --model.schedule.peak 3e-4
  lit-stable check --config my_recipe.yaml
  torchrun --standalone --nproc-per-node 8 -m lit_stable fit --config my_recipe.yaml

exit codes:
  0    done
  1    failed, or a file cannot be read or written, as on a full disk
  2    the recipe or the command line is wrong; nothing was run
  3    stopped by the recovery ladder; its ledger says why
  4    stopped by `ctl stop` or the kill file, a checkpoint was written; or the kill file let nothing begin
  75   to be started again with --resume auto, to step back (stability.recovery.restart)
  130  stopped by Ctrl-C, a checkpoint was written
  141  whoever read the output has gone, as with `| head`
  143  stopped by SIGTERM, a checkpoint was written"""

_READER_GONE = 141  # 128 + SIGPIPE, what a shell reports of other programs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: Arguments without the program name; those of the process if None.

    Returns:
        The exit code; the help text lists them.
    """
    try:
        code = _answer(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where it can be caught, and not when the interpreter ends
    except BrokenPipeError:
        _drop_output()
        return _READER_GONE
    except OSError as error:
        from lit_stable.callbacks.not_written import FULL  # late: nothing is imported for help

        if error.filename is not None or error.errno not in FULL:  # files are named there
            raise
        _drop_output()
        remedy = "make room, or send it elsewhere"
        print(f"lit-stable: the output could not be written ({error.strerror}); {remedy}.", file=sys.stderr)
        return 1
    return code


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered still


def _answer(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from lit_stable.environment import version_block

        print(version_block())
        return 0
    if arguments[0] not in SUBCOMMANDS:
        print(_unknown(arguments[0]), file=sys.stderr)
        return 2
    # Late: none of the answers above needs it.
    from lit_stable.cli.main import run

    return run(arguments)


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    return _HELP.format(subcommands="\n".join(f"  {name:<{width}}  {line}" for name, line in SUBCOMMANDS.items()))


def _unknown(word: str) -> str:
    if word.startswith("-"):
        return f"lit-stable: {word}: options come after the subcommand; start with one of {', '.join(SUBCOMMANDS)}."
    near = difflib.get_close_matches(word, SUBCOMMANDS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"write one of {', '.join(SUBCOMMANDS)}."
    return f"lit-stable: {word}: is no subcommand; {remedy}"


if __name__ == "__main__":
    sys.exit(main())
