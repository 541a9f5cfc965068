"""The language model that learns to see, as a LightningModule: that of a text run, with eyes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.safe_checkpoints import KEY
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.recompute import Recompute
from lit_stable.model.sharding import Compiled
from lit_stable.module import GPTModule
from lit_stable.optim.options import ADAMW, OptimizerOptions
from lit_stable.optim.schedule import LRSchedule
from lit_stable.strategies.mesh import data_mesh, tensor_mesh
from lit_stable.vlm.backbones import HF, SIGHT, find_backbone, tokenizer_problems, vision_weights
from lit_stable.vlm.options import GatedOptions, VisionOptions, tensor_parallel_problem
from lit_stable.vlm.sight import Sight, build_sight
from lit_stable.vlm.vision import TransformersVision

# What of the record of new blocks and vision backbone leaves weights what they mean.
_FREE = {"init_std", "run"}


@judges_arguments(ValueError, "model")
class VLMModule(GPTModule):
    """Train gated blocks between the layers of a language model on batches of images and captions.

    All of ``GPTModule`` holds: loss, optimizer, learning rate, what is logged. Backbones begin with the weights of
    runs of their own. Nothing is frozen here: that is ``LayerNormFreeze``'s, whose rules name modules (``gpt``,
    ``sight.vision``), and who may set norms free on schedule.

    With ``gpt.document_mask`` tokens attend within their own document, as in text, and all of a sample to its image.
    The end-of-text in front of a caption is a document by itself, as to a language model that was trained so.

    Args:
        gpt: The language model.
        schedule: The learning rate.
        gated: The new blocks.
        vision: The vision backbone.
        language: Whose trained weights the language model begins with: a run of ``gpt``'s options, by its name, folder
            or checkpoint (``lit-stable import`` makes one from a folder of ``transformers``); null: by chance.
        optimizer: Which optimizer, with which options; patterns name parameters from ``gpt`` and ``sight`` on.
        seed_init: Of the initial weights.
        compile: As in ``GPTModule``, of the language model: ``auto`` = on CUDA only. New blocks are not compiled.
        recompute: Activation checkpointing of the language model's layers.
        z_loss: Weight of the mean of log(Z)^2 in the training loss, Z being the softmax's denominator; 0: none.
        gradient_predivide: As in ``GPTModule``.

    Raises:
        ValueError: when a value is out of range.
        MisconfigurationException: in ``setup``, when a backbone is not there or the images are of another size; in a
            resume, when the checkpoint's new blocks are built otherwise.
    """

    def __init__(
        self,
        gpt: GPTConfig,
        schedule: LRSchedule,
        gated: GatedOptions = GatedOptions(),  # noqa: B008 - frozen
        vision: VisionOptions = VisionOptions(),  # noqa: B008
        language: str | None = None,
        optimizer: OptimizerOptions = ADAMW,
        seed_init: int = 0,
        compile: Literal["auto", "on", "off"] = "auto",
        recompute: Recompute = False,
        z_loss: float = 0.0,
        gradient_predivide: float | None = None,
    ) -> None:
        super().__init__(gpt, schedule, optimizer, seed_init, compile, recompute, z_loss, gradient_predivide)
        gated.places(gpt)
        self.gated = gated
        self.vision = vision
        self.language = language
        self.sight: Sight | None = None
        self._language_path: Path | None = None

    # -- model -------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if problems := self.meeting_problems(self.trainer.datamodule):  # type: ignore[attr-defined]
            raise MisconfigurationException("\n".join(problems))

    def meeting_problems(self, data: Any) -> list[str]:
        problems = []
        own, given = (self.vision.image_size, self.vision.channels), (data.image_size, data.channels)
        if own != given:
            problems.append(
                f"model.vision.image_size={own[0]}, channels={own[1]}: the data's images have {given[0]} pixels and"
                f" {given[1]} channels; set data.image_size and data.channels to the same."
            )
        if self.is_continued:
            return problems
        for find in (self._find_language, self._find_vision):
            try:
                path = find()
            except ValueError as error:
                problems.append(str(error))
                continue
            if find == self._find_language and path is not None:
                problems += tokenizer_problems(path, data.tokenizer)
        return problems

    def _find_language(self) -> Path | None:
        return None if self.language is None else find_backbone(self.language, self.runs, "model.language")

    def _find_vision(self) -> Path | None:
        run = self.vision.run
        return None if run is None else find_backbone(run, self.runs, "model.vision.run")

    def build(self, compile: Compiled, fixed_shapes: bool) -> None:
        mesh = self.device_mesh
        split = None if mesh is None else tensor_mesh(mesh)
        if split is not None and (problem := tensor_parallel_problem(split.size())):
            raise MisconfigurationException(problem)
        super().build(compile, fixed_shapes)
        fresh = not self.is_continued and self.initial_weights is None
        if fresh and (language := self._find_language()) is not None:
            self.begin_with(language)  # as long as the language model is all that there is
            self._language_path = language
        vision = self._find_vision() if fresh else None
        self.sight = build_sight(
            self.config,
            self.gated,
            self.vision,
            seed=self.seed_init,
            device=self.trainer.strategy.root_device,
            mesh=None if mesh is None else data_mesh(mesh),
            policy=getattr(self.trainer.strategy.precision_plugin, "policy", None),
            trained=None if vision is None else vision_weights(vision, self.vision),
        )

    def forward(self, input_ids: Tensor, images: Tensor, documents: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Token ids (B, T) and images (B, C, height, width), uint8 -> logits (B, T, V)."""
        assert self.sight is not None
        # One call of one child, so that who makes it again sees all of the network.
        logits: Tensor = self.sight(self.gpt, input_ids, images, self.documents_of(input_ids, documents))
        return logits

    def token_logits(self, input_ids: Tensor) -> Tensor:
        """Of the language model alone, for ``SampleText``: token ids (B, T) -> logits (B, T, V)."""
        assert self.gpt is not None
        logits: Tensor = self.gpt(input_ids, self.documents_of(input_ids))
        return logits

    @property
    def head_makes_losses(self) -> bool:
        return False  # the language model is called through `sight`, which hands no labels on

    def _forward_batch(self, batch: Mapping[str, Tensor], labels: Tensor | None = None) -> Any:
        return self(batch["input_ids"], batch["images"], batch.get("documents") if self.config.document_mask else None)

    # -- what others ask of the model --------------------------------------------------------------------------------

    def outline(self) -> nn.Module:
        with torch.device("cpu" if self.vision.hf else "meta"):  # what is read from files cannot be left out
            sight = Sight(self.config, self.gated, self.vision)
        return nn.ModuleDict({"gpt": GPT(self.config), "sight": sight})

    def optimized(self, parts: nn.Module) -> nn.Module:
        return parts

    def describe(self) -> str:
        return f"{self.config} that sees by {self.gated} and {self.vision}"

    def parameter_parts(self, parts: Any) -> dict[str, int]:
        named = {"language": parts.gpt, "new_blocks": parts.sight.blocks, "vision": parts.sight.vision}
        return {name: sum(p.numel() for p in part.parameters()) for name, part in named.items()}

    @property
    def begun_with(self) -> Path | None:
        return self.initial_weights or self._language_path

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[KEY][SIGHT] = self._sight_record()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        stored = checkpoint.get(KEY, {}).get(SIGHT, {})
        own = self._sight_record()
        # A folder that has moved is the same backbone, and another one in its place is not.
        free = _FREE | {"hf"} if HF in stored and HF in own else _FREE
        problems = [
            f"model.{part}.{name}={own[part].get(name)}: the checkpoint has {value}, and its weights would mean"
            " something else here; set it back, or begin a new run."
            for part, options in stored.items()
            for name, value in options.items()
            if part != HF and name not in free and own[part].get(name) != value
        ]
        before, now = stored.get(HF, {}), own.get(HF, {})
        problems += [
            f"model.vision.hf={self.vision.hf}: its config.json has {name} {now.get(name)}, and the checkpoint is of a"
            f" model that has {before.get(name)}; give the folder of that one, or begin a new run."
            for name in sorted(before.keys() | now.keys())
            if before and now and before.get(name) != now.get(name)
        ]
        if problems:
            raise MisconfigurationException("\n".join(problems))

    def _sight_record(self) -> dict[str, dict[str, Any]]:
        """By what new blocks and vision backbone are built."""
        assert self.sight is not None
        record = {"gated": asdict(self.gated), "vision": asdict(self.vision)}
        vision = self.sight.vision
        return {**record, HF: vision.built_by()} if isinstance(vision, TransformersVision) else record
