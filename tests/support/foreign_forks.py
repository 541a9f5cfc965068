"""Scripts of projects that may not have Lightning or this package imported: forks of one interpreter that has neither.

``foreign_forks.py FOLDER...`` runs each folder's ``project.py`` in it, with the words in ``words.json``, the first of
which is searched for modules before all other paths; what it prints goes to ``said``, its exit code to ``ended``.
"""

import gc
import json
import os
import runpy
import sys
import warnings
from pathlib import Path

import bitsandbytes  # noqa: F401
import jsonargparse  # noqa: F401
import torch
import torchmetrics  # noqa: F401


def be(folder: Path) -> None:
    """Be ``PYTHONPATH=FIRST python -W ignore project.py REST``."""
    os.chdir(folder)
    said = os.open("said", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    warnings.simplefilter("ignore")
    path, *words = json.loads(Path("words.json").read_text())
    sys.path.insert(0, path)
    sys.argv = ["project.py", *words]
    runpy.run_path("project.py", run_name="__main__")


if __name__ == "__main__":
    assert torch.get_num_threads() == 1, "threads do not come along"
    assert not {"lightning", "pytorch_lightning", "lit_stable"} & sys.modules.keys()
    gc.freeze()
    for folder in map(Path, sys.argv[1:]):
        if not (child := os.fork()):
            be(folder)
            sys.exit()
        _, status = os.waitpid(child, 0)
        (folder / "ended").write_text(str(os.waitstatus_to_exitcode(status)))
