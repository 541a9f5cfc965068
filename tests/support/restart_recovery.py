"""A run on two processes that a launcher starts again: ``torchrun --max-restarts N restart_recovery.py FOLDER``.

The ladder asks for a restart, to step back. Rank 0 is killed while it loads the checkpoint of that rewind, once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rank_scenarios_recovery import FIRST, STEPS
from recovery_project import RUNGS, Data, Module, make_trainer

from lit_stable.callbacks import Recovery, fit_with_recovery
from lit_stable.callbacks.fit_with_recovery import pending_target
from lit_stable.callbacks.recovery_exit import RESTART, Rewind

RANK = int(os.environ["RANK"])


class Reader(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        step = self.trainer.global_step + 1
        with (folder / f"read-{RANK}.jsonl").open("a") as file:
            file.write(json.dumps([step, self.ids[step]]) + "\n")
        return loss


def dies_within(load: Any) -> Any:
    def torch_load(*args: Any, **kwargs: Any) -> Any:
        load(*args, **kwargs)
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    return torch_load


folder = Path(sys.argv[1])
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
if RANK == 0 and pending_target(folder) and not (folder / "died").exists():
    torch.load = dies_within(torch.load)
module = Reader({FIRST})
try:
    recovery = Recovery(RUNGS, {"not_finite": "rewind"}, restart=True)
    trainer = make_trainer(folder, STEPS, devices=2, strategy="ddp", recovery=recovery)
    fit_with_recovery(trainer, module, Data(), ckpt_path="auto")
except Rewind:
    sys.exit(RESTART)
if RANK == 0:
    torch.save(module.state_dict(), folder / "weights.pt")
