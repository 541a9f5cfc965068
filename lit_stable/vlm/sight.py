"""What a language model lacks to see: a vision backbone, and gated blocks in front of some of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import init_module
from lit_stable.model.sharding import norm_parameters
from lit_stable.vlm.cross_attention import Gate, GatedBlock
from lit_stable.vlm.options import GatedOptions, VisionOptions
from lit_stable.vlm.vision import VisionTransformer, build_vision

# B batch, T tokens, D d_model, S patches, E their width, V vocabulary


class Sight(nn.Module):
    """A vision backbone and the blocks that bring what it sees into a language model.

    The language model is no part of it and knows nothing of it: it is called as ever, and in front of each of the
    chosen layers the new block changes the residual stream that enters. As long as the gates are shut, which they are
    at first, the logits are those of the language model alone, bit for bit.

    Args:
        language: The language model's configuration.
        gated: Of the new blocks.
        vision: Of the vision backbone.
        settings: Of a backbone of `transformers`, when a checkpoint holds its weights; see `TransformersVision`.

    Attributes:
        blocks: The new blocks, by the number of the layer that each stands in front of.
    """

    def __init__(
        self,
        language: GPTConfig,
        gated: GatedOptions,
        vision: VisionOptions,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.vision = build_vision(vision, settings)
        config = gated.config(language)
        places = gated.places(language)
        self.blocks = nn.ModuleDict({str(place): GatedBlock(config, self.vision.width) for place in places})

    def forward(self, gpt: GPT, input_ids: Tensor, images: Tensor, documents: Tensor | None = None) -> Tensor:
        """Token ids (B, T) and images (B, C, height, width), uint8 -> logits (B, T, V)."""
        features = self.vision(images)  # (B, S, E)
        with self.between_layers(gpt, features):
            logits: Tensor = gpt(input_ids, documents)
        return logits

    @contextmanager
    def between_layers(self, gpt: GPT, features: Tensor) -> Iterator[None]:
        """Within it a language model sees: features (B, S, E)."""
        with ExitStack() as stack:
            for place, block in self.blocks.items():

                def enter(layer: nn.Module, args: tuple[Tensor, ...], block: nn.Module = block) -> tuple[Tensor, ...]:
                    return (block(args[0], features), *args[1:])

                # Behind those of sharding, which gather the layer's own weights.
                stack.callback(gpt.blocks[int(place)].register_forward_pre_hook(enter).remove)
            yield


def build_sight(
    language: GPTConfig,
    gated: GatedOptions,
    vision: VisionOptions,
    *,
    seed: int,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    policy: MixedPrecisionPolicy | None = None,
    trained: Mapping[str, Tensor] | None = None,
) -> Sight:
    """Build a `Sight` on ``device``, initialised from ``seed``, and shard it over ``mesh`` if there is one.

    Args:
        language: The language model's configuration.
        gated: Of the new blocks.
        vision: Of the vision backbone.
        seed: Of the initial weights; equal on all ranks.
        device: Where the weights live.
        mesh: The data-parallel ranks; ``None``: nothing is sharded.
        policy: Mixed precision of the sharded parameters; norms and gates are exempt from it.
        trained: Weights of the vision backbone by name, in place of initial ones.
    """
    sight = Sight(language, gated, vision).to(device)
    fill(sight, gated.config(language), vision, seed)
    if trained is not None:
        sight.vision.load_state_dict(dict(trained))
    if mesh is not None:
        for part in (*sight.blocks.values(), sight.vision):
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy or MixedPrecisionPolicy(cast_forward_inputs=False),
                ignored_params=norm_parameters(part),
            )
    return sight


def fill(sight: Sight, gated: GPTConfig, vision: VisionOptions, seed: int) -> None:
    """Fill the new blocks and a ViT from ``seed``, each parameter by its name; gates are shut."""
    init_module(sight.blocks, "sight.blocks.", gated, seed)
    for module in sight.blocks.modules():
        if isinstance(module, Gate):
            nn.init.zeros_(module.weight)
    if isinstance(sight.vision, VisionTransformer):
        init_module(sight.vision, "sight.vision.", vision.config(), seed)
