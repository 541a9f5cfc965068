"""Text that needs no download: the running interpreter's own standard library."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lit_stable.data.prepare import SUMMARY_FILE, prepare_documents
from lit_stable.data.store import store_format
from lit_stable.data.text.documents import Document

BUILTIN_PREFIX = "builtin:"
VALIDATION_FRACTION = 0.05

# Installed packages and build settings differ between machines that run the same Python; test suites hold generated
# tables and deliberately broken files.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_EXCLUDED_NAMES = re.compile(r"config-|_sysconfigdata")


class Fingerprint(NamedTuple):
    """Size and identity of a corpus."""

    num_files: int
    num_bytes: int
    sha256: str


class PythonStandardLibrary:
    """The ``.py`` files of the standard library as documents, sorted by relative name, about 11 MB."""

    name = "python-stdlib"

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder

    def files(self) -> Iterator[tuple[str, str]]:
        """Relative name and text of each file.

        Raises:
            ValueError: when there is none: some distributions ship the library without its source.
        """
        paths = [path for path in self.folder.rglob("*.py") if self._wanted(path.relative_to(self.folder))]
        if not paths:
            raise ValueError(f"{self.folder}: holds no Python source; give data.sources a prepared folder instead.")
        for name, path in sorted((path.relative_to(self.folder).as_posix(), path) for path in paths):
            with tokenize.open(path) as file:  # honours the file's coding line
                yield name, file.read()

    def __iter__(self) -> Iterator[Document]:
        return (Document(text, self.name) for _, text in self.files())

    def fingerprint(self) -> Fingerprint:
        """Number of files, bytes, and SHA-256 over names and texts."""
        sha256 = hashlib.sha256()
        num_files = num_bytes = 0
        for name, text in self.files():
            content = text.encode("utf-8")
            sha256.update(f"{name}\0{len(content)}\0".encode() + content)
            num_files += 1
            num_bytes += len(content)
        return Fingerprint(num_files, num_bytes, sha256.hexdigest())

    def _wanted(self, relative: Path) -> bool:
        return not _EXCLUDED_FOLDERS.intersection(relative.parts) and not any(
            _EXCLUDED_NAMES.match(part) for part in relative.parts
        )


BUILTIN = {PythonStandardLibrary.name: PythonStandardLibrary}


def cache_folder() -> Path:
    """``$LIT_STABLE_CACHE``, else ``lit-stable`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if folder := os.environ.get("LIT_STABLE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit-stable"


def builtin_folder(name: str, tokenizer: str, cache: Path | None = None) -> Path:
    """Where the corpus ``name`` lies once tokenised: named after its content, the tokenizer and the store format.

    Raises:
        ValueError: when there is no such corpus.
    """
    return _folder(_known_fingerprint(_corpus(name)), name, tokenizer, cache)


def ensure_builtin(name: str, tokenizer: str, cache: Path | None = None, report: Callable[[str], None] = print) -> Path:
    """The prepared folder of the corpus ``name``, written on first use.

    Safe when several processes call it at once: the first to finish wins and the others take its folder.

    Raises:
        ValueError: when there is no such corpus or tokenizer.
    """
    corpus = _corpus(name)
    fingerprint = _known_fingerprint(corpus)
    folder = _folder(fingerprint, name, tokenizer, cache)
    size = f"{fingerprint.num_files:,} files, {fingerprint.num_bytes / 1e6:.1f} MB, sha256 {fingerprint.sha256[:12]}"
    if (folder / SUMMARY_FILE).is_file():
        report(f"{BUILTIN_PREFIX}{name}: {size}, tokenised before in {folder}")
        return folder
    report(f"{BUILTIN_PREFIX}{name}: {size}, tokenising into {folder}")
    try:
        prepare_documents(corpus, folder, tokenizer, VALIDATION_FRACTION, report)
    except FileExistsError:
        report(f"{BUILTIN_PREFIX}{name}: another process tokenised it first")
    return folder


def _known_fingerprint(corpus: PythonStandardLibrary) -> Fingerprint:
    newest = max((path.stat().st_mtime_ns for path in corpus.folder.rglob("*.py")), default=0)
    return _fingerprint(corpus.folder, newest)


@functools.cache  # a second of reading, asked for by every part that names the folder
def _fingerprint(folder: Path, changed: int) -> Fingerprint:
    return PythonStandardLibrary(folder).fingerprint()


def _corpus(name: str) -> PythonStandardLibrary:
    if name not in BUILTIN:
        raise ValueError(f"{BUILTIN_PREFIX}{name}: no such corpus; there is {', '.join(BUILTIN)}.")
    return BUILTIN[name]()


def _folder(fingerprint: Fingerprint, name: str, tokenizer: str, cache: Path | None) -> Path:
    slug = tokenizer.replace(":", "-")
    if not re.fullmatch(r"[\w-]+", slug):  # a regular expression is no name
        slug = "spec-" + hashlib.sha256(tokenizer.encode()).hexdigest()[:12]
    file = Path(tokenizer).expanduser()
    if file.is_file():
        slug = "file-" + hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return (cache or cache_folder()) / f"{name}-{fingerprint.sha256[:12]}-{slug}-format{store_format(())}"
