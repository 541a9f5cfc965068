from __future__ import annotations

import pytest

from lit_stable.strategies.launcher import describe_launcher, launched_devices, restart_advice

TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "none", "RANK": "3"}


def test_torchrun_says_how_many_devices_and_nodes():
    assert launched_devices(TORCHRUN) == {"devices": 4, "num_nodes": 4}
    assert launched_devices({**TORCHRUN, "WORLD_SIZE": "4"}) == {"devices": 4, "num_nodes": 1}


@pytest.mark.parametrize("missing", ["LOCAL_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"])
def test_without_torchrun_the_recipe_decides(missing):
    # A process that Lightning itself started has a world size too, but no run id.
    assert launched_devices({name: value for name, value in TORCHRUN.items() if name != missing}) is None


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (TORCHRUN, "torchrun"),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, "SLURM"),
        ({"SLURM_JOB_ID": "1"}, "this command"),  # a shell on a node of a job
        ({}, "this command"),
    ],
)
def test_the_launcher_is_named(environ, text):
    assert describe_launcher(environ) == text


def test_restarts_that_would_wait_for_ever_are_spoken_of():
    restarts = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    (line,) = restart_advice(restarts)
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line
    for change in ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"TORCHELASTIC_MAX_RESTARTS": "0"}):
        assert restart_advice({**restarts, **change}) == []
    assert restart_advice({}) == []
