"""What each rung of the recovery ladder does: on record first, then done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .batch_history import BatchHistory, planned_samples
from .positions import Range
from .progress import Progress
from .recovery_book import RecoveryBook
from .recovery_exit import RecoveryStopped, Rewind
from .recovery_ladder import Decision
from .recovery_overrides import RecoveryOverrides
from .recovery_rungs import Rung
from .recovery_standing import path_of, targets
from .recovery_words import how_to_go_on, next_rung, sentence, unless_over
from .seeds import mix

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: Options of a rewind that stay in force.
_IN_FORCE = ("factor", "weight_decay", "dropout", "clip", "reset_optimizer")
_NOTHING = Rung("rewind")


class Remedies:
    """Carry out the decisions of the ladder.

    Attributes:
        acts: False: they are written down, and nothing is done.
        book: Where they are written down.
        overrides: What they change in the run.
        history: Which data each step has read.
    """

    def __init__(self, rungs: Sequence[Rung], acts: bool) -> None:
        self.rungs, self.acts = rungs, acts
        self.book = RecoveryBook()
        self.overrides = RecoveryOverrides()
        self.history = BatchHistory()

    def rung(self, index: int) -> Rung:
        """A rung by its place; behind the last one is the end."""
        return self.rungs[index] if index < len(self.rungs) else Rung("stop")

    def is_spent(self, index: int, step: int, cut: float = 1.0) -> bool:
        """Whether a rung may not be taken after a step; ``cut``: of the learning rate, about to be made."""
        rung = self.rungs[index]
        at_floor = rung.do == "lr" and self._lr_factor(step) * cut <= rung.floor
        return at_floor or self.book.times_taken(index + 1, step, with_logged=not self.acts) >= rung.limit

    def _lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied by; in a dry run, what it would be."""
        return self.overrides.lr_factor * (1.0 if self.acts else self.book.logged_factor(step))

    def take(
        self, trainer: Trainer, step: int, decision: Decision, criterion: str | None, may_rewind: bool
    ) -> dict[str, Any] | None:
        """Do what the rung says; or why it could not be done.

        Args:
            trainer: Whose run it is.
            step: The last one taken.
            decision: Of the ladder.
            criterion: When the trouble will count as over, in words.
            may_rewind: Whether somebody will begin another fit.

        Raises:
            Rewind: the fit is to be left, for one from an earlier checkpoint.
            RecoveryStopped: at the end of the ladder.
        """
        rung = self.rung(decision.rung)
        done: dict[str, Any] = {"rung": decision.rung + 1, "acted": self.acts}
        if rung.do == "rewind":
            if self.acts and not may_rewind:
                return {"no_rewind": "this fit was not begun by fit_with_recovery"}
            return self._rewind(trainer, step, decision, rung, done)
        if rung.do == "skip":
            done |= {"until": step + rung.skip_steps}
        elif rung.do == "lr":
            done |= {"factor": max(rung.floor / self._lr_factor(step), rung.factor)}
        then = ""
        if criterion:
            done |= {"criterion": criterion}
            then = unless_over(criterion, self._next(decision.rung, step, done.get("factor", 1.0), may_rewind))
        self.book.add(trainer, step, rung.do, why=decision.why, evidence=decision.evidence, done=done, then=then)
        if self.acts:
            if rung.do == "stop":
                stopped = self.book.entries[-1]
                raise RecoveryStopped(f"{sentence(stopped)}; {how_to_go_on(self.book.path)}.")
            self.overrides.cuts *= done.get("factor", 1.0)
            self.overrides.skip_until = max(self.overrides.skip_until, done.get("until", 0))
        return None

    def _next(self, index: int, step: int, cut: float, may_rewind: bool) -> str:
        """What follows if a rung does not help, as far as can be said beforehand."""
        for place, rung in enumerate(self.rungs[index + 1 :], index + 1):
            is_possible = rung.do != "rewind" or may_rewind or not self.acts
            if is_possible and not self.is_spent(place, step, cut):
                return next_rung(rung, place + 1)
        return next_rung(None, 0)

    def _rewind(
        self, trainer: Trainer, step: int, decision: Decision, rung: Rung, done: dict[str, Any]
    ) -> dict[str, Any] | None:
        target = self.book.usable(trainer, targets(self.book.now, decision.first_bad, rung.before, rung.to))
        if target is None:
            wanted = f"healthy checkpoint from before step {decision.first_bad}"
            return {"no_rewind": f"there is no {wanted if rung.to is None else f'checkpoint of step {rung.to}'}"}
        done |= {"to": target.step, "path": target.path, "after": rung.after if rung.drop else 0}
        done |= {name: getattr(rung, name) for name in _IN_FORCE if getattr(rung, name) != getattr(_NOTHING, name)}
        if rung.drop:
            first = max(target.step + 1, decision.first_bad - rung.before)
            done |= {"dropped": [list(self._window(trainer, step, first, rung.after))]}
        if rung.reshuffle:
            done |= {"reshuffled": [self._new_order(trainer, step, done.get("dropped", []))]}
        branch = self.book.now.branch
        taken = self.book.times_taken(decision.rung + 1, step, with_logged=not self.acts) + 1
        then = f"rewind {taken} of at most {rung.max_times} on this rung"
        if taken == rung.max_times:
            then += f", after which {self._next(decision.rung, step, 1.0, may_rewind=True)}"
        elif rung.to is None:
            then += f"; another up to step {step + done['after']} goes further back"
        told: dict[str, Any] = {"why": decision.why, "evidence": decision.evidence, "done": done, "then": then}
        on_disk = self.book.add(trainer, step, "rewind", **told)
        if not self.acts:
            return None
        if not on_disk:
            self.book.forget_last()
            return {"no_rewind": f"{self.book.path} cannot be written"}
        if self.book.now.branch == branch:  # else the next fit would drop nothing, and step back for ever
            return {"no_rewind": "its line is not in effect"}
        self.book.set_aside(trainer)
        raise Rewind(step, target.step, path_of(self.book.folder, target.path))

    def _window(self, trainer: Trainer, step: int, first: int, after: int) -> Range:
        planned = planned_samples(trainer.callbacks)  # type: ignore[attr-defined]
        return self.history.window(first, step + after, step, Progress.of(trainer).dropped, planned)

    def _new_order(self, trainer: Trainer, step: int, dropped: list[list[int]]) -> tuple[int, int]:
        """Where another order begins, behind all that is dropped, so that none of it comes back; and its key."""
        progress = Progress.of(trainer)
        ends = [stop for _, stop in [*progress.dropped, *dropped]]
        behind = [position for position, _ in progress.reshuffles]
        return max([progress.position, *ends, *behind]), mix(self.book.now.branch, step)
