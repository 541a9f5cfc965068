"""What `lit-stable replay` prints of a step."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from lit_stable.replay.again import replay_once
from lit_stable.replay.comparison import ABOVE_NOISE, OTHER_RANKS, differences, logged_values, noise
from lit_stable.replay.module_outputs import SURGE, first_outlier
from lit_stable.replay.start import Start, find_start
from lit_stable.replay.step_watch import LOSS, NORM, Replayed

_SHOWN = 5  # differences


def replay(
    run: Path, step: int, at: str | None = None, runs: int = 2, worst: int = 4, words: Sequence[str] = ()
) -> tuple[str, bool]:
    """The page that ``replay`` prints, and whether the step was the same; all ranks of a launch call it.

    Raises:
        ValueError: when the run has no such step, the checkpoint lies behind it, or a replay ended before it.
    """
    start = find_start(run, step, at)
    replays = [replay_once(start, step, f"replay {number} of {runs}", words) for number in range(1, runs + 1)]
    seen = replays[0]
    _refuse_what_ended_before(step, replays, words)
    verdict, same = _verdict(start, replays)
    if seen.compiled:
        seen = replay_once(start, step, "one more replay, in which nothing is compiled", words, compiles=False)
        verdict.append("what follows is of one more replay, in which nothing was compiled")
    lines = [_header(start, step, runs), *verdict, *_step(seen, step), *_worst(seen, worst)]
    return "\n".join(lines), same


def _refuse_what_ended_before(step: int, replays: Sequence[Replayed], words: Sequence[str]) -> None:
    if all(step in one.values[LOSS] or step in one.values[NORM] for one in replays):
        return
    taken = [one for name in (LOSS, NORM) for one in replays[0].values[name]]
    end = f"the replay ended behind step {max(taken)}" if taken else "the replay took no step"
    remedy = f"leave out what ends it before, among {shlex.join(words)}" if words else "give a step that the run took"
    raise ValueError(f"step={step}: was not taken again, for {end}; {remedy}.")


def _header(start: Start, step: int, runs: int) -> str:
    lines = [f"{start.folder}: step {step}, {runs} times from {start.origin}, by {start.recipe.name}"]
    if start.step < start.beginning.steps:
        lines.append(
            f"steps {start.step + 1} to {start.beginning.steps} ran by an earlier recipe, and may come out else"
        )
    return "\n".join(lines)


def _verdict(start: Start, replays: list[Replayed]) -> tuple[list[str], bool]:
    first = replays[0]
    level = noise([one.values for one in replays])
    lines = [f"noise: replays differ by up to {level:.2g}" if level else "noise: none, replays are equal to the bit"]
    tolerance = ABOVE_NOISE * level
    if first.ranks != start.beginning.ranks:
        tolerance = max(tolerance, OTHER_RANKS)
        lines.append(
            f"ranks: {first.ranks}, the run had {start.beginning.ranks}; differences up to {OTHER_RANKS:g} are nothing"
        )
    logged = logged_values(start.folder, [LOSS, NORM])
    compared = sorted({s for name, values in first.values.items() for s in values if s in logged[name]})
    if not compared:
        return [*lines, f"nothing to compare with: the run has logged no step behind {start.step}"], True
    found = differences(logged, first.values, tolerance)
    steps = f"steps {compared[0]} to {compared[-1]}, {len(compared)} logged"
    if not found:
        how = "to the bit" if not tolerance else f"within {tolerance:.2g}"
        return [*lines, f"same: {steps}, loss and gradient norm {how}"], True
    lines.append(f"NOT the same: {steps}, {len(found)} numbers differ; the first:")
    for one in found[:_SHOWN]:
        lines.append(
            f"  step {one.step}: {one.name} {one.logged:.7g} in the log, {one.replayed:.7g} now ({one.size:.2g})"
        )
    return lines, False


def _step(found: Replayed, step: int) -> list[str]:
    loss, norm = (found.values[name].get(step, math.nan) for name in (LOSS, NORM))
    lines = [f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g}"]
    if found.error:
        lines.append(f"ended by {found.error}")
    outlier = first_outlier(found.outputs.get(step, {}), found.outputs.get(step - 1, {}))
    ordinary = f"outputs of all modules are finite, none above {SURGE:g} times the usual"
    return [*lines, ordinary if outlier is None else outlier.sentence()]


def _worst(found: Replayed, count: int) -> list[str]:
    ranked = sorted(found.losses.items(), key=lambda item: -item[1] if item[1] == item[1] else -math.inf)
    lines = [f"samples, worst first ({min(count, len(ranked))} of {len(ranked)}):"]
    for sample, loss in ranked[:count]:
        lines.append(f"  sample {sample}: loss {loss:.4f}")
        lines += [f"    {line}" for line in found.texts[sample].split("\n")]
    return lines
