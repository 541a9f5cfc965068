"""The contract of every callback on one CUDA device, in a project that knows nothing of this package."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from contract_entries import ENTRIES, groups
from contract_fits import Runs, fit_without_waiting
from contract_project import Host
from contract_promises import PROMISES

from lit_stable.callbacks import Progress
from lit_stable.callbacks.base import MisconfigurationException

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:GradSpikeSkip")]
GROUPS = groups("auto")
every_callback = pytest.mark.parametrize("name", ENTRIES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All fits of one group of callbacks in one precision, made once."""

    @functools.cache
    def made(group: str, precision: str) -> Runs:
        host = Host(accelerator="gpu", precision=precision)
        return Runs(GROUPS[group], host, tmp_path_factory.mktemp(group))

    return made


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("promise", PROMISES)
def test_it_keeps(promise: str, precision: str, group: str, runs: Any) -> None:
    if precision == "16-mixed" and any(ENTRIES[name].no_scaler for name in GROUPS[group]):
        pytest.skip("refuses a gradient scaler, which the test below asks for")
    PROMISES[promise](runs(group, precision))


@every_callback
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_no_step_waits_for_the_device_where_that_is_promised(precision: str, name: str) -> None:
    host = Host(accelerator="gpu", precision=precision)
    refused = ENTRIES[name].no_scaler
    if precision == "16-mixed" and refused:
        with pytest.raises(MisconfigurationException, match=refused):
            fit_without_waiting(host, name)
        return
    trainer = fit_without_waiting(host, name)
    assert (trainer.global_step, Progress.of(trainer).steps) == (12, 12)
