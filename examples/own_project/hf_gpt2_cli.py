"""The Hugging Face GPT-2 of hf_gpt2.py under a plain LightningCLI: the callbacks stand in the YAML.

python hf_gpt2_cli.py fit --config hf_gpt2.yaml
"""

from __future__ import annotations

from hf_gpt2 import GPT2
from lightning.pytorch.cli import LightningCLI
from plain import CharacterData

if __name__ == "__main__":
    LightningCLI(GPT2, CharacterData, save_config_kwargs={"overwrite": True})
