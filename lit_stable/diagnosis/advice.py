"""What to try against each kind of event, and the options of `fit` that do it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lit_stable.diagnosis.episodes import Episode
from lit_stable.run.folder import checkpoint_step, checkpoints

_DROPPED = 20  # steps of data on either side of an event that are dropped when the run goes back before it


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    text: str
    options: list[str] = field(default_factory=list)
    """Of `lit-stable fit`."""


def _drop(episode: Episode) -> list[str]:
    step = episode.event.step
    return ["--data.skip_steps", f"[{max(1, step - _DROPPED)}-{step + _DROPPED}]"]


def _spike(episode: Episode) -> list[Advice]:
    skip = ["--config", "stability/grad_spike_skip"]
    if episode.recovered is not None:
        return [Advice("It came back by itself; skip such steps from now on.", skip)]
    return [Advice("Go back before it, drop the data around it and skip such steps.", [*skip, *_drop(episode)])]


def _not_finite(episode: Episode) -> list[Advice]:
    skip = ["--config", "stability/grad_spike_skip"]
    return [Advice("Go back before it and skip steps whose gradients are not finite.", [*skip, *_drop(episode)])]


_LOWER = ["--stability.lr_override.factor", "0.5"]


def _slow_divergence(episode: Episode) -> list[Advice]:
    return [
        Advice("Go back to where the loss was best, with half the learning rate and gradients clipped.", [
            *_LOWER, "--stability.grad_clip.max_norm", "0.3",
        ]),
        Advice("If it comes again: a model with `model.gpt.qk_norm` stands higher rates; that is a new run.", []),
    ]  # fmt: skip


def _plateau(episode: Episode) -> list[Advice]:
    gap, before = (float(episode.event.evidence[name]) for name in ("gap", "gap_at_best"))
    if gap > before + 0.05:
        return [Advice("Validation stalls while training still falls: look at the order and mixture of the data.")]
    return [Advice("Both losses stall: lower the learning rate from here on.", _LOWER)]


def _low_loss(episode: Episode) -> list[Advice]:
    return [Advice("Read the text of these steps; if it repeats itself, go back and drop it.", _drop(episode))]


def _loss_scale_collapse(episode: Episode) -> list[Advice]:
    return [
        Advice("Go on in bf16, which needs no loss scale.", ["--trainer.precision", "bf16-mixed"]),
        Advice("Or go back to a loss scale of 1 or more, with half the learning rate.", _LOWER),
    ]


def _surge(episode: Episode) -> list[Advice]:
    return [Advice("It often leads the loss: lower the learning rate now, while the loss is still well.", _LOWER)]


ADVICE: dict[str, Callable[[Episode], list[Advice]]] = {
    "spike": _spike,
    "not_finite": _not_finite,
    "slow_divergence": _slow_divergence,
    "plateau": _plateau,
    "low_loss": _low_loss,
    "loss_scale_collapse": _loss_scale_collapse,
    "surge": _surge,
}


def command(run: Path | None, episode: Episode, advice: Advice) -> str:
    """The command line that does it; of a run of another trainer the recipe and the checkpoint stand as names."""
    recipe, checkpoint = "RECIPE", f"CHECKPOINT_AT_OR_BEFORE_{episode.well}"
    recipes = sorted(run.glob("recipe-*.yaml")) if run is not None else []
    if episode.well is None:  # to go back to
        recipe = str(recipes[-1]) if recipes else recipe
        return "no step before it was good; begin anew: " + shlex.join(
            ["lit-stable", "fit", "--config", recipe, *advice.options]
        )
    if run is not None and recipes:
        recipe = str(recipes[-1])
        good = [path for path in checkpoints(run) if (checkpoint_step(path) or 0) <= episode.well]
        if good:
            checkpoint = str(good[-1])
        else:
            return f"no checkpoint at or before step {episode.well} is left; begin anew: " + shlex.join(
                ["lit-stable", "fit", "--config", recipe, *advice.options]
            )
    return shlex.join(["lit-stable", "fit", "--config", recipe, *advice.options, "--ckpt_path", checkpoint])
