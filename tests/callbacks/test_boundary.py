"""The callbacks stand alone: they import nothing of the application, and nothing heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lit_stable.callbacks as package
from lit_stable.callbacks import public_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "callbacks").rglob("*.py"))
#: What one file alone imports, when it is used.
LATE = {"eight_bit_blocks.py": {"bitsandbytes"}, "eight_bit_kernel.py": {"triton"}}
ALLOWED = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch", "torchmetrics"}


def imports(path: Path) -> list[tuple[int, str]]:
    """(level, module) of every import in a file; level 0 = absolute."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_file_imports_the_application(path: Path) -> None:
    for level, module in imports(path):
        assert level <= 1, f"from {'.' * level}{module} reaches out of the folder"
        top = module.split(".")[0]
        allowed = ALLOWED | LATE.get(path.name, set())
        if level == 0:
            assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {module}"


def printed_by(code: str) -> str:
    """What a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Both namespaces, then the package, in one new process: what ``GradClip`` is of them, and all that it loaded."""
    # What torchmetrics imports where it finds it, transformers among it, is not ours.
    code = """
import sys, pytorch_lightning, torchmetrics, lightning.pytorch
before = set(sys.modules)
from lit_stable.callbacks import GradClip
loaded = set(sys.modules) - before
print(issubclass(GradClip, pytorch_lightning.Callback), issubclass(GradClip, lightning.pytorch.Callback), *loaded)
"""
    return printed_by(code).split()


def test_importing_the_package_loads_nothing_heavy_and_nothing_of_the_application(imported: list[str]) -> None:
    modules = set(imported[2:])
    assert not {"bitsandbytes", "tokenizers", "datasets", "tensorboard", "transformers", "triton"} & modules
    ours = {m for m in modules if m.split(".")[0] == "lit_stable"}
    assert {m for m in ours if not m.startswith("lit_stable.callbacks")} == {"lit_stable"}
    assert "callbacks" not in modules


def test_where_the_other_namespace_was_imported_first_its_class_is_among_our_bases(imported: list[str]) -> None:
    assert imported[:2] == ["True", "True"]


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_behind_lightning_the_package_has_all_its_classes_at_once(namespace: str) -> None:
    """A LightningCLI finds a class by its bare name among those that exist, and asks the package for none."""
    code = f"import {namespace} as namespace, lit_stable.callbacks as c; print(sorted(set(c.__all__) - set(vars(c))))"
    assert printed_by(code).strip() == "[]"


def test_a_name_that_was_replaced_stays_so_when_the_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in package.__all__:
        monkeypatch.delitem(vars(package), name, raising=False)
    monkeypatch.setitem(vars(package), "GradClip", "another")
    assert package.ZClip is public_names.ZClip
    assert package.GradClip == "another"


def test_the_link_to_the_top_level_folder_is_intact() -> None:
    link = ROOT / "lit_stable" / "callbacks"
    assert os.readlink(link) == "../callbacks"
    assert (link / "__init__.py").samefile(ROOT / "callbacks" / "__init__.py")


def test_the_package_list_names_every_folder_with_python_or_yaml_in_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent for p in (ROOT / "lit_stable").rglob("__init__.py")} | {ROOT / "lit_stable" / "recipes"}
    folders |= {ROOT / "lit_stable" / p.parent.relative_to(ROOT) for p in (ROOT / "callbacks").rglob("*.py")}
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(settings["packages"]) == expected
    assert settings["package-dir"]["lit_stable.callbacks"] == "callbacks"


def test_the_public_names_are_those_of_their_file_and_none_is_a_files() -> None:
    """A file of that name, once imported, would be what the package answers with."""
    assert set(package.__all__) == {name for name in vars(public_names) if not name.startswith("_")}
    assert not set(package.__all__) & {path.stem for path in FILES}


def test_the_package_has_the_names_that_it_lists_and_no_other() -> None:
    assert set(package.__all__) <= set(dir(package))
    assert package.GradClip
    assert set(package.__all__) <= set(vars(package)), "with the first all are there, for YAML that names them bare"
    with pytest.raises(AttributeError, match="has no attribute 'GradClipp'"):
        package.GradClipp  # noqa: B018
