"""How the recovery ladder leaves a fit."""

from __future__ import annotations

from pathlib import Path

#: Exit code of a process whose run the ladder has ended: who restarts it would only see it end again.
STOPPED = 3
#: Exit code of a process that wants to be started again, to go on from the checkpoint that the ledger names
#: (EX_TEMPFAIL of sysexits.h).
RESTART = 75


class Rewind(Exception):
    """Raised out of a fit on all ranks: the next fit is to go on from ``path``.

    Attributes:
        path: Of the checkpoint.
        signal: Number of the signal that asked for an end in the very step, or 0; see ``GracefulStop``.
    """

    def __init__(self, step: int, to: int, path: Path) -> None:
        super().__init__(f"step {step}: rewinding to step {to}, {path}.")
        self.path, self.signal = path, 0

    @property
    def exit_code(self) -> int:
        """Of a process that leaves for the rewind: whoever was asked to stop must not ask to be started again."""
        return 128 + self.signal if self.signal else RESTART


class RecoveryStopped(RuntimeError):
    """Raised on all ranks when the ladder has come to its end; the text says why and how to go on."""
