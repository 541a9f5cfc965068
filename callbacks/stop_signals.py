"""The signals by which a run is told to end. Imports nothing heavy: every data worker reads it."""

from __future__ import annotations

import signal

#: What schedulers give notice by, where the system has it. Others tell a process of a fault of its own, of its children
#: or of its terminal.
NOTICES = tuple(
    name
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGALRM", "SIGURG")
    if hasattr(signal, name)
)
#: All that may stop a run.
STOPPING = ("SIGINT", "SIGTERM", *NOTICES)


def number_of(name: str) -> int:
    """The number of a signal by its name, with or without ``SIG``."""
    return signal.Signals[_whole(name)]


def wrong_with(name: str) -> str | None:
    """Why a signal cannot stop a run, in words; ``None`` where it can."""
    whole = _whole(name)
    if whole in STOPPING:
        return None
    if whole not in signal.Signals.__members__:
        why = "is no signal"
    elif whole in ("SIGKILL", "SIGSTOP"):
        why = "can be heeded by no process"
    else:
        why = "gives notice of something else than the end of a job"
    return f"{name!r} {why}; name one of {', '.join(NOTICES)}."


def _whole(name: str) -> str:
    return name if name.startswith("SIG") else f"SIG{name}"
