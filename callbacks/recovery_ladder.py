"""Which rung of the ladder a run stands on: plain Python over its losses and what was found in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .events import Event
from .loss_band import LossBand
from .recovery_rungs import Rung, place_of

#: Keys of an event's evidence that tell of a level before the trouble, and of its step: a slow divergence has them.
_BEST, _BEST_STEP = "best", "best_step"


@dataclass
class Episode:
    """Trouble that is not over."""

    rung: int
    """Index of the rung that it stands on."""
    since: int
    """Step at which that rung was taken."""
    first_bad: int
    """First step that was not well."""
    why: str
    level: float
    """Loss to come back to."""
    spread: float
    made: int = -1
    """The highest rung that was not only logged; -1: none."""


@dataclass(frozen=True)
class Decision:
    """Take a rung; beyond the last one the run stops."""

    step: int
    rung: int
    """Index; ``len(rungs)``: past the last one."""
    first_bad: int
    why: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Trouble is over."""

    step: int
    rung: int
    """The rung on which it ended."""
    evidence: dict[str, Any]


class RecoveryLadder:
    """Climbs one rung at a time, each with a patience and a criterion for success; every rung has a budget.

    Trouble begins with an event of a kind that has a trigger, at that trigger's rung. It is over when the loss is back:
    the median of five losses, all finite and without another event, within ``Rung.within`` deviations of the level
    before it. If it is not over after ``Rung.steps`` steps the next rung follows; an event that begins at a higher rung
    leads there at once. A rung whose budget is spent is passed over.

    Args:
        rungs: Lowest first.
        triggers: Kind of event -> rung.
        spent: Index of a rung -> whether it cannot be taken any more.
        acts: False: decisions are only logged, and one that acts and goes on from there makes them anew.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        triggers: Mapping[str, str | int],
        spent: Callable[[int], bool] = lambda _: False,
        acts: bool = True,
    ) -> None:
        self.rungs, self._acts = list(rungs), acts
        self._starts = {kind: place_of(where, rungs) for kind, where in triggers.items()}
        self._spent = spent
        self.band = LossBand()
        self.episode: Episode | None = None
        self._last_cut: int | None = None
        self._made_cut: int | None = None  # the last that was not only logged

    def observe(self, step: int, loss: float | None, events: Sequence[Event] = ()) -> Decision | Outcome | None:
        """Take in a step's loss, if it had one, and what was found in the run at it; at most one thing follows."""
        troubles = [event for event in events if self._starts.get(event.kind) is not None]
        if troubles:
            self.band.forget_recent()
        if loss is not None:
            self.band.observe(loss, accept=self.episode is None and not troubles)
        if self.episode is None:
            return self._begin(troubles) if troubles else None
        worst = max(troubles, key=self._start, default=None)
        if worst is not None and self._start(worst) > self._stands(self.episode):
            return self._climb(step, self._start(worst), worst.kind, worst.evidence)
        return self._watch(step, self.episode)

    def _start(self, event: Event) -> int:
        start = self._starts[event.kind]
        assert start is not None
        return start

    def _stands(self, now: Episode) -> int:
        """The rung that was taken last, or the one below that where the trouble begins."""
        return max(now.made, (self._starts[now.why] or 0) - 1) if self._acts else now.rung

    def _begin(self, troubles: Sequence[Event]) -> Decision | None:
        worst = max(troubles, key=self._start)
        best = worst.evidence.get(_BEST)
        level = min(self.band.level, best) if isinstance(best, float) else self.band.level
        first_bad = int(worst.evidence.get(_BEST_STEP, worst.step - 1)) + 1
        self.episode = Episode(-1, worst.step, first_bad, worst.kind, level, self.band.spread)
        return self._climb(worst.step, self._start(worst), worst.kind, worst.evidence)

    def _climb(self, step: int, rung: int, why: str, evidence: Mapping[str, Any]) -> Decision | None:
        assert self.episode is not None
        while rung < len(self.rungs) and self._spent(rung):
            rung += 1
        self.episode.rung, self.episode.since = rung, step
        if self._acts:
            self.episode.made = rung
        self.band.forget_recent()
        here = self.rungs[rung] if rung < len(self.rungs) else None
        if here is not None and here.do == "lr":
            if self._last_cut is not None and step - self._last_cut < here.cooldown:
                return None  # the cut before may still help; the rung's patience runs
            self._last_cut = step
            self._made_cut = step if self._acts else self._made_cut
        return Decision(step, rung, self.episode.first_bad, why, dict(evidence))

    def _watch(self, step: int, now: Episode) -> Decision | Outcome | None:
        rung = self.rungs[min(now.rung, len(self.rungs) - 1)]
        if self.band.is_inside(rung.within, now.level, now.spread):
            self.episode = None
            return Outcome(step, now.rung, {"level": now.level, "steps": step - now.first_bad + 1})
        stands = self._stands(now)
        is_the_end = rung.do == "stop" or now.rung >= len(self.rungs)  # of a run that acts; a dry run watches on
        if stands == now.rung and (is_the_end or step - now.since < rung.steps):
            return None
        return self._climb(step, stands + 1, now.why, {"not_back_after": step - now.since, "level": now.level})

    def refuse(self, decision: Decision) -> Decision | None:
        """Go on to the next rung, since this one could not be taken."""
        return self._climb(decision.step, decision.rung + 1, decision.why, decision.evidence)

    def end(self) -> None:
        """Forget the trouble under way."""
        self.episode = None
        self.band.forget_recent()

    def criterion(self, rung: int) -> str:
        """What has to come true, in words."""
        if rung >= len(self.rungs) or self.rungs[rung].do == "stop" or self.episode is None:
            return ""
        here, now = self.rungs[rung], self.episode
        limit = now.level + here.within * now.spread
        bound = f"median of 5 losses <= {limit:.4g}" if math.isfinite(limit) else "5 finite losses in a row"
        return f"{bound} within {here.steps} steps"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts."""
        episode = None if self.episode is None else asdict(self.episode)
        cuts = {"last_cut": self._last_cut, "made_cut": self._made_cut}
        return {"band": self.band.state_dict(), "episode": episode, **cuts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore."""
        self.band.load_state_dict(state["band"])
        episode = state["episode"]
        # Older states do not tell what was only logged: all of it is taken for done, as it was then.
        self.episode = None if episode is None else Episode(**{"made": episode["rung"], **episode})
        self._made_cut = state.get("made_cut", state["last_cut"])
        self._last_cut = self._made_cut if self._acts else state["last_cut"]
