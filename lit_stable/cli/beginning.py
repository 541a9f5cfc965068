"""Where a run begins: at the start, with the newest run of its name, or at a checkpoint that was named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_stable.run.console import say
from lit_stable.run.folder import checkpoint_step, find_checkpoint, newest_run_with_checkpoint, where_to_go_on


@dataclass(frozen=True)
class Beginning:
    """What a command begins with."""

    checkpoint: Path | None = None
    """None: the start."""
    resumed: Path | None = None
    """The run folder that ``resume: auto`` goes on in."""
    weights_alone: bool = False
    """Of the checkpoint nothing else is taken: a new run at step 0."""

    @property
    def goes_on_from(self) -> Path | None:
        """The checkpoint whose steps the run counts on."""
        return None if self.weights_alone else self.checkpoint

    @property
    def step(self) -> int:
        """Steps taken by then, by the checkpoint's name."""
        return (checkpoint_step(self.goes_on_from) or 0) if self.goes_on_from else 0


def find_beginning(
    command: str, ckpt_path: str | None, ckpt_part: str, resume: str | None, folder: tuple[Path, str], has_ladder: bool
) -> Beginning:
    """What the options of a command line mean.

    Args:
        command: ``fit``, ``check``, ``validate`` or ``test``.
        ckpt_path: See :func:`~lit_stable.run.folder.find_checkpoint`.
        ckpt_part: ``all`` or ``weights``.
        resume: ``auto`` or None.
        folder: Of all runs, and the name of the run below it.
        has_ladder: Whether a rewind that has not begun is gone on with.

    Raises:
        ValueError: when options say different things, or there is no such checkpoint.
    """
    weights_alone = command in ("fit", "check") and ckpt_part == "weights"
    if weights_alone and ckpt_path is None:
        raise ValueError(
            "ckpt_part=weights: says how a run begins, not how it goes on; give --ckpt_path, or leave it out."
        )
    if resume == "auto":
        if ckpt_path is not None:
            raise ValueError(f"ckpt_path={ckpt_path} and resume=auto: each says where to go on; give one of them.")
        return _newest(*folder, has_ladder)
    if ckpt_path is not None:
        return Beginning(find_checkpoint(str(ckpt_path), *folder), weights_alone=weights_alone)
    if command in ("validate", "test"):
        raise ValueError(f"ckpt_path=null: `{command}` needs a checkpoint; give --ckpt_path PATH or last.")
    return Beginning()


def _newest(root: Path, name: str, has_ladder: bool) -> Beginning:
    run = newest_run_with_checkpoint(root, name)
    checkpoint = None if run is None else where_to_go_on(run, has_ladder)
    if checkpoint is None:
        say(f"resume=auto: no run of {name!r} yet, starting one")
        return Beginning()
    say(f"resume=auto: going on with {checkpoint}")
    return Beginning(checkpoint, run)
