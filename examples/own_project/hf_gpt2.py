"""A Hugging Face GPT-2, built from its configuration without a download, made stable by a list of callbacks.

python hf_gpt2.py
"""

from __future__ import annotations

import characters
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from lit_stable.callbacks import BatchSizeWarmup, GradClip, GradSpikeSkip, LayerNormFreeze, SafeCheckpoints, StepSeed

STEPS, BATCH = 40, characters.BATCH


class GPT2(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def training_step(self, batch, batch_idx):
        output = self.model(input_ids=batch["bytes"], labels=batch["bytes"])
        self.log("loss", output.loss)
        return output.loss * batch["weight"].mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, fused=True)
        schedule = get_linear_schedule_with_warmup(optimizer, 5, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=CSVLogger("runs/hf_gpt2", name="", version=""),
        log_every_n_steps=5,
        callbacks=[
            GradSpikeSkip(),
            GradClip(max_norm=1.0),
            BatchSizeWarmup(f"{BATCH} for 10 steps then {2 * BATCH}", global_batch=2 * BATCH, micro_batch=BATCH),
            LayerNormFreeze([{"modules": ["model.transformer.h.*"], "stop": 10}]),
            StepSeed(seed=1),  # GPT-2 has dropout
            SafeCheckpoints(),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT2(), characters.training())
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name:24} {value:.4g}")


if __name__ == "__main__":
    main()
