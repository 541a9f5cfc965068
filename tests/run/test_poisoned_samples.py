from __future__ import annotations

import pytest
from tiny_gpt_run import GLOBAL_BATCH, fit

from lit_stable.callbacks import Progress
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.run.poisoned_samples import PoisonedSamples


def test_a_step_that_holds_such_a_sample_kills_the_run() -> None:
    place = 2 * GLOBAL_BATCH - 1  # the last one of step 2
    run = fit(steps=4, callbacks=(PoisonedSamples(place, place),), max_norm=None, validates=False)
    assert not any(weight.isfinite().all() for weight in run.weights.values())


def test_where_such_steps_are_kept_out_they_are_those_of_the_places() -> None:
    drill = PoisonedSamples(GLOBAL_BATCH, 2 * GLOBAL_BATCH)  # all of step 2 and one of step 3
    run = fit(steps=4, callbacks=(drill,), validates=False)  # its clipping skips what is not finite
    assert Progress.of(run.trainer).skipped == 2


def test_a_stretch_that_is_none_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"PoisonedSamples\(first=5, last=4\)"):
        PoisonedSamples(5, 4)
