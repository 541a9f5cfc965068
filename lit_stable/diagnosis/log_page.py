"""What `lit-stable diagnose` prints of a run's log."""

from __future__ import annotations

from pathlib import Path

from lit_stable.diagnosis.advice import ADVICE, command
from lit_stable.diagnosis.episodes import Episode, episodes, events
from lit_stable.diagnosis.scalars import NAMES, Scalars, read_scalars


def diagnose(log: Path, names: dict[str, str] | None = None) -> str:
    """The page that ``diagnose`` prints.

    Raises:
        ValueError: when the log cannot be read or holds no training loss.
    """
    if unknown := sorted(set(names or {}) - set(NAMES)):
        raise ValueError(f"names.{unknown[0]}: is no scalar that detectors read; they read {', '.join(NAMES)}.")
    scalars = read_scalars(log, names)
    found = episodes(scalars, events(scalars))
    lines = [_header(log, scalars)]
    if not found:
        return "\n".join([*lines, "nothing found: no spike, no slow divergence, no plateau, no loss too low."])
    lines += [_line(episode) for episode in found]
    worst = next((e for e in found if e.recovered is None), None)
    if worst is None:
        lines.append("the run recovered from all of them.")
    else:
        lines.append(f"first sign of what it did not recover from: step {worst.event.step}")
        lines.append(f"last good step: {'none in this log' if worst.well is None else worst.well}")
    run = log if log.is_dir() else None
    chosen = worst or found[0]
    lines.append("what to try:")
    for advice in ADVICE[chosen.event.kind](chosen):
        lines.append(f"  {advice.text}")
        if advice.options:
            lines.append(f"    {command(run, chosen, advice)}")
    return "\n".join(lines)


def _header(log: Path, scalars: Scalars) -> str:
    first, last = scalars.rows[0][0], scalars.rows[-1][0]
    read = ", ".join(name if name == one else f"{name} ({one})" for name, one in scalars.called.items())
    missing = [name for name in NAMES if name not in scalars.called]
    lacks = f"; not in the log: {', '.join(missing)}" if missing else ""
    return f"{log}: steps {first} to {last}, a loss every {scalars.every}; read: {read}{lacks}"


def _line(episode: Episode) -> str:
    end = "not recovered" if episode.recovered is None else f"recovered at step {episode.recovered}"
    return f"  {episode.event.sentence()}; {end}"
