"""Vision backbones: from an image to the features of its patches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lit_stable.model.compute_dtype import compute_dtype
from lit_stable.model.config import GPTConfig
from lit_stable.model.linear import Linear
from lit_stable.model.mlp import build_mlp
from lit_stable.model.norm import build_norm
from lit_stable.vlm.cross_attention import CrossAttention
from lit_stable.vlm.options import VisionOptions

# B batch, C channels, S patches, P pixels of a patch in all channels, E width


_OF_THE_FILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}  # its weights are read as fp32


class VisionBlock(nn.Module):
    """Attention of all patches to all, then an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config.norm, config.d_model, config)
        self.attention = CrossAttention(config, config.d_model)
        self.mlp_norm = build_norm(config.norm, config.d_model, config)
        self.mlp = build_mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, E) -> (B, S, E)."""
        dtype = compute_dtype(self.attention.q.weight)
        y = self.attention_norm(x).to(dtype)
        x = x + self.attention(y, y).to(x.dtype)
        x = x + self.mlp(self.mlp_norm(x).to(dtype)).to(x.dtype)
        return x


class VisionTransformer(nn.Module):
    """A ViT without class token (Dosovitskiy et al. 2020, arXiv:2010.11929): patches, positions, blocks, a norm."""

    def __init__(self, options: VisionOptions) -> None:
        super().__init__()
        config = options.config()
        self.patch = options.patch
        self.width = options.d_model
        self.embed = Linear(options.channels * options.patch**2, options.d_model)
        self.positions = nn.Embedding(options.patches, options.d_model)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(options.n_layer))
        self.norm = build_norm(config.norm, config.d_model, config)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, size, size), uint8 -> features (B, S, E)."""
        dtype = compute_dtype(self.embed.weight)
        x = self.embed(patches(scaled(images), self.patch).to(dtype)) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.norm(x)
        return features


def scaled(images: Tensor) -> Tensor:
    """Bytes as numbers from -1 to 1, fp32."""
    return images.float() / 127.5 - 1


def patches(images: Tensor, size: int) -> Tensor:
    """Images (B, C, height, width) -> (B, S, P), row by row."""
    return F.unfold(images, size, stride=size).transpose(1, 2)


class TransformersVision(nn.Module):
    """A vision model that `transformers` reads from a folder: features are its last hidden states.

    Images are brought to the size that it wants, grey ones to its channels. Loaded with its weights on every rank.

    Args:
        folder: What `transformers` has saved.
        channels: Of the images.
        settings: What ``built_by`` returned, out of a checkpoint that holds the weights; the folder is then not read.

    Raises:
        ValueError: when `transformers` is not there, or the folder holds no such model, or one of other channels.
    """

    def __init__(self, folder: Path, channels: int, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.model = read_model(folder) if settings is None else model_with(settings)
        config = self.model.config
        if not hasattr(config, "image_size") or not hasattr(config, "hidden_size"):
            raise ValueError(
                f"model.vision.hf={folder}: {type(self.model).__name__} is no vision model with image_size and"
                " hidden_size; give one such as ViT or the vision part of CLIP."
            )
        self.size: int = config.image_size
        self.channels: int = getattr(config, "num_channels", 3)
        self.width: int = config.hidden_size
        if channels not in (1, self.channels):
            raise ValueError(
                f"model.vision.channels={channels}: the model in {folder} sees {self.channels}; set"
                " model.vision.channels and data.channels to that, or to 1, for grey images."
            )

    def built_by(self) -> dict[str, Any]:
        """What its weights belong to: its settings, but for where it lay and who has written them."""
        settings: dict[str, Any] = json.loads(self.model.config.to_json_string(use_diff=False))
        return {name: value for name, value in sorted(settings.items()) if name not in _OF_THE_FILE}

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, size, size), uint8 -> features (B, S, E)."""
        pixels = F.interpolate(scaled(images), (self.size, self.size), mode="bilinear", antialias=True)
        pixels = pixels.expand(-1, self.channels, -1, -1).to(next(self.model.parameters()).dtype)
        features: Tensor = self.model(pixel_values=pixels).last_hidden_state
        return features


def read_model(folder: Path) -> Any:
    """The model in a folder that `transformers` has written, in fp32."""
    if not folder.is_dir():  # `from_pretrained` would take it for the name of a model on a hub
        raise ValueError(f"model.vision.hf={folder}: is no folder; give the one that transformers has written.")
    load: Any = _transformers(f"model.vision.hf={folder}").AutoModel.from_pretrained
    try:
        return load(folder, local_files_only=True).float()
    except (OSError, ValueError) as error:
        raise ValueError(f"model.vision.hf={folder}: cannot be read ({str(error).splitlines()[0]}).") from error


def model_with(settings: Mapping[str, Any]) -> Any:
    """A model with these settings, in fp32, whose weights are still to be loaded."""
    transformers = _transformers("the checkpoint's vision backbone")
    config = transformers.AutoConfig.for_model(**settings)
    return transformers.AutoModel.from_config(config).float()


def _transformers(what: str) -> Any:
    try:
        import transformers  # slow to import, and not needed by others
    except ImportError as error:
        raise ValueError(f"{what}: is read by transformers; pip install 'lit-stable[hf]'.") from error
    return transformers


def build_vision(
    options: VisionOptions, settings: Mapping[str, Any] | None = None
) -> VisionTransformer | TransformersVision:
    """The backbone that the options ask for. Weights of a ViT, and with ``settings``, are still to be loaded."""
    if options.hf is None:
        return VisionTransformer(options)
    return TransformersVision(Path(options.hf), options.channels, settings)
