"""What is packaged. The public names are frozen in tests/test_main.py and tests/callbacks/test_contract.py."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def source_files() -> dict[str, Path]:
    """Every file of the package by its name in the wheel, through the links to the top-level folders."""
    folders = {"lit_stable": ROOT / "lit_stable", "lit_stable/callbacks": ROOT / "callbacks"}
    folders["lit_stable/recipes"] = ROOT / "recipes"
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".yaml", ".typed", ".md") and "__pycache__" not in path.parts
    }


def test_pyproject_lists_every_package():
    listed = set(re.findall(r'"([\w.]+)"', re.search(r"^packages = \[(.*?)\]", PYPROJECT, re.MULTILINE | re.DOTALL)[1]))
    found = {name.rpartition("/")[0].replace("/", ".") for name in source_files() if name.endswith(".py")}
    assert listed == found | {"lit_stable.recipes"}


@pytest.mark.parametrize("name", ["callbacks", "recipes"])
def test_the_top_level_folders_are_linked_into_the_package(name):
    link = ROOT / "lit_stable" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree") / "lit-stable"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs", "shared")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    # Where the build tool is installed no index is asked for it.
    offline = ["--no-build-isolation"] if setuptools_builds() else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", *offline, "--wheel-dir", tree.parent, tree]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tree.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def setuptools_builds() -> bool:
    if importlib.util.find_spec("setuptools") is None:
        return False
    from importlib.metadata import version

    needed = re.search(r'requires = \["setuptools>=(\d+)"\]', PYPROJECT)[1]
    return int(version("setuptools").split(".")[0]) >= int(needed)


def test_a_wheel_holds_every_file_of_the_package_once_and_nothing_else(names):
    packaged = [name for name in names if ".dist-info/" not in name]
    assert sorted(packaged) == sorted(source_files())


def test_a_wheel_holds_the_licence_and_the_command(names):
    assert [name for name in names if name.endswith("/LICENSE")]
    assert [name for name in names if name.endswith("/entry_points.txt")]
