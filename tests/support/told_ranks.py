"""A rank that writes down what its launcher tells it of its place, into a file of the folder that it runs in."""

import json
import os
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

if __name__ == "__main__":
    told = {name: int(os.environ[name]) for name in NAMES}
    Path(f"rank-{told['RANK']}.json").write_text(json.dumps(told))
