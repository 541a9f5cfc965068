"""What all tests share: a folder of their own, fixed seeds, no GPU test where there is no GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: files run side by side on all cores, where threads of one would wait for those of others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import installed_once  # noqa: F401 - before Lightning
import pytest
import torch

# No tests, and some are scripts: to import one silences the log of every test after it.
collect_ignore = ["support"]

#: Folders and files that launch processes or compile, half a minute each.
LONG = {"distributed", "examples", "recipes", "vlm", "test_kill.py", "test_combinations.py", "test_benchmarks.py"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than cores: a worker waits while the ranks that it has launched run, or end."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Files are dealt out in the order below; by itself xdist begins with those of many tests, which are the quick."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first, or one core waits at the end while the other is at a file of one long test."""
    items.sort(key=lambda item: not LONG & {item.path.name, item.path.parent.name})
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def pytest_collection_finish() -> None:
    """What was imported and collected stays: whoever collects garbage need not walk it each time."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def out_of_the_repository(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What several tests share is made before any test has a folder of its own."""
    os.chdir(tmp_path_factory.mktemp("shared"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing a test writes lands in the repository, and a subprocess finds the package there."""
    monkeypatch.chdir(tmp_path)
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes milliseconds for devices that are not there
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A fit on one rank of a sharding strategy leaves its process group behind; the next test wants its own."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def result(results: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """What one scenario came to, out of the ``results`` of the module's launch; its traceback fails the test."""
    value = results[request.param]
    assert "error" not in value, value["error"]
    return value
