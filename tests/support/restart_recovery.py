"""Have torchrun's agent start two ranks again and again: ``python restart_recovery.py FOLDER DEATHS SEED``.

The agent is the one of ``torchrun --max-restarts``; its workers are forked from a process that has imported everything
once. Prints as JSON what ended the lives, and what each run came to. When a run is through before there were deaths
enough, another one begins.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

# With gloo, the ranks of a second life otherwise look for those of the first, and may wait for ever.
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def life(*arguments: Any) -> None:
    """Of one rank; what it needs is imported where it is forked from."""
    from two_rank_lives import live

    live(*arguments)


def main(folder: Path, wanted: int, seed: int) -> None:
    import restart_recovery  # under the name by which the workers find it

    multiprocessing.set_forkserver_preload(["two_rank_lives"])
    runs: list[Any] = []
    died: list[Any] = []
    while len(died) < wanted or not runs:
        run = folder / f"run-{len(runs) + 1}"
        run.mkdir()
        config = LaunchConfig(
            *(1, 1, 2),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=run.name,
            max_restarts=wanted + 20,
            start_method="forkserver",
        )
        elastic_launch(config, restart_recovery.life)(folder, run, wanted, seed)
        runs.append(json.loads((run / "judged.json").read_text()))
        died = [json.loads(line) for line in (folder / "deaths.jsonl").read_text().splitlines()]
    print(json.dumps({"deaths": died, "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
