from __future__ import annotations

import csv
import re

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tiny_recipe import command, losses, write_recipe
from torch.utils.data import DataLoader

from lit_stable.run.masked_share import MaskedShare


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.shares: list[float] = []

    def training_step(self, batch, batch_idx):
        return self.weight * batch["labels"].sum()

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        if "data/masked_share" in self.trainer.callback_metrics and batch_idx % 2:
            self.shares.append(float(self.trainer.callback_metrics["data/masked_share"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_the_share_is_that_of_all_micro_batches_of_the_step():
    labels = torch.zeros(6, 2, 4, dtype=torch.int64)
    labels[0, 0] = labels[2] = labels[3, 1, :2] = -100  # 4 of 16, 10 of 16, 0 of 16
    trainer = Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MaskedShare()],
    )
    model = Model()
    trainer.fit(model, DataLoader([{"labels": part} for part in labels], batch_size=None))
    assert model.shares == [4 / 16, 10 / 16, 0.0]


@pytest.fixture
def repetitive(tmp_path):
    recipe = write_recipe(tmp_path, trainer__max_steps=2, validate_every=10, data__micro_batch=1)
    (tmp_path / "text.txt").write_text("ab" * 5000)
    words = ["--tokenizer", "bytes", "--validation_fraction", "0", "--artefacts", "off"]
    assert command("prepare", tmp_path / "text.txt", "--out", tmp_path / "repetitive", *words).code == 0
    return ["--config", recipe, "--data.sources", f"{{text: {{path: {tmp_path}/repetitive}}}}"]


def test_a_run_on_nothing_but_repetitions_has_no_loss_and_no_fault(tmp_path, repetitive):
    done = command("fit", *repetitive, "--data.mask_repeats", "{min_count: 10}")
    assert done.code == 0, done.err
    assert "no loss on sequence with a period of 1 to 13 tokens held 10 times" in done.out
    with (tmp_path / "runs" / "tiny" / "0001" / "csv-01" / "metrics.csv").open() as file:
        shares = {row["data/masked_share"] for row in csv.DictReader(file)}
    assert shares == {"1.0"}
    assert {float(loss) for loss in losses(tmp_path / "runs" / "tiny" / "0001").values()} == {0.0}
    assert re.search(r"^tokens +256$", done.out, re.MULTILINE)


def test_without_a_mask_nothing_is_logged(tmp_path, repetitive):
    assert command("fit", *repetitive).code == 0
    run = tmp_path / "runs" / "tiny" / "0001"
    assert "data/masked_share" not in (run / "csv-01" / "metrics.csv").read_text()
    assert min(float(loss) for loss in losses(run).values()) > 0
