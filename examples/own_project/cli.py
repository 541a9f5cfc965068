"""The project of plain.py under a plain LightningCLI: the callbacks stand in the YAML.

python cli.py fit --config cli.yaml
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from plain import CharacterData, CharacterModel

if __name__ == "__main__":
    LightningCLI(CharacterModel, CharacterData, save_config_kwargs={"overwrite": True})
