import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import lit_stable
from lit_stable import environment


def rows():
    return dict(line.split(maxsplit=1) for line in environment.version_block().splitlines())


def test_the_block_names_every_version_a_bug_report_needs():
    block = rows()
    assert list(block) == [
        *("lit-stable", "Python", "torch", "lightning", "torchmetrics", "jsonargparse", "bitsandbytes", "tokenizers"),
        *("OS", "CPUs", "GPUs"),
    ]
    assert block["lit-stable"].startswith(lit_stable.__version__)
    assert block["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert block["lightning"] == version("lightning")


def test_torch_is_listed_with_the_cuda_it_was_built_for():
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    assert rows()["torch"] == f"{torch.__version__} ({cuda})"


def test_what_is_not_installed_is_listed_as_such(monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(environment, "version", missing)
    assert rows()["tokenizers"] == "not installed"


def test_a_torch_that_does_not_load_is_reported_and_not_fatal(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(environment.importlib, "import_module", broken)
    assert rows()["torch"] == f"{version('torch')} (cannot be imported: libcudart.so: cannot open shared object file)"
    assert rows()["GPUs"] == "unknown"


def test_the_commit_of_a_checkout_is_found_and_an_install_has_none(tmp_path):
    assert environment.git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert environment.git_commit(tmp_path) is None  # a repository without a commit
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert head.startswith(environment.git_commit(tmp_path))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'lit_stable' has no attribute 'Nope'"):
        _ = lit_stable.Nope


def test_the_digest_of_the_code_is_that_of_its_content_wherever_it_lies(tmp_path):
    package = Path(lit_stable.__file__).parent
    shutil.copytree(package, tmp_path / "lit_stable", ignore=shutil.ignore_patterns("__pycache__"))  # follows links
    assert environment.code_digest(tmp_path / "lit_stable") == environment.code_digest()
    environment.code_digest.cache_clear()
    file = tmp_path / "lit_stable" / "callbacks" / "grad_clip.py"
    file.write_text(file.read_text() + " ")
    assert environment.code_digest(tmp_path / "lit_stable") != environment.code_digest()
