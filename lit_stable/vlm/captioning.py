"""What a trained model says of images: a checkpoint opened, and captions written, token by token."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lit_stable.callbacks.extra_forward import evaluating
from lit_stable.callbacks.generation import continue_tokens
from lit_stable.model.generate import within_documents
from lit_stable.model.gpt import GPT
from lit_stable.run.past_step import rebuilt_data
from lit_stable.vlm.backbones import HF, SIGHT
from lit_stable.vlm.datamodule import PairDataModule
from lit_stable.vlm.options import GatedOptions, VisionOptions
from lit_stable.vlm.sight import Sight
from lit_stable.weights.stored_model import build_model, open_model


def open_vlm(path: Path, device: torch.device | str = "cpu") -> tuple[GPT, Sight]:
    """The language model and its eyes in a checkpoint, in evaluation mode. Neither backbone's folder is needed.

    Raises:
        ValueError: when the checkpoint is of a model without eyes.
    """
    stored = open_model(path)
    record = stored.record.get(SIGHT)
    if record is None:
        raise ValueError(f"{path}: is of a model that does not see; give a checkpoint of `system: vlm`.")
    sight = Sight(stored.config, GatedOptions(**record["gated"]), VisionOptions(**record["vision"]), record.get(HF))
    prefix = f"{SIGHT}."
    entries = {e.name.removeprefix(prefix): e for e in stored.tensors.weights() if e.name.startswith(prefix)}
    sight.load_state_dict({name: entry.read() for name, entry in entries.items()})
    return build_model(stored, device), sight.to(device).eval()


def write_captions(
    gpt: GPT, sight: Sight, images: Tensor, eot_id: int, new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """Token ids of a caption for each image, without the end-of-text that ends it.

    Args:
        gpt: The language model.
        sight: Its eyes.
        images: (N, C, size, size), uint8.
        eot_id: What a caption begins and ends with.
        new_tokens: At most so many.
        temperature: Divides the logits; 0: the most likely token each time.
        seed: Of the draws.
    """
    device = next(gpt.parameters()).device
    forward = within_documents(gpt, eot_id)
    with evaluating(gpt), evaluating(sight), torch.no_grad():
        features = sight.vision(images.to(device))
        with sight.between_layers(gpt, features):
            new = continue_tokens(
                forward,
                [[eot_id]] * len(images),
                new_tokens,
                device=device,
                temperature=temperature,
                generator=torch.Generator(device).manual_seed(seed),
                max_length=gpt.config.max_length,
            )
    return [ids[: ids.index(eot_id)] if eot_id in ids else ids for ids in new.tolist()]


def data_of_run(path: Path) -> PairDataModule:
    """The images and captions that the run of a checkpoint was trained on, opened.

    Raises:
        ValueError: when the checkpoint does not say which.
    """
    record = open_model(path).record
    if "recipe" not in record:
        raise ValueError(
            f"{path}: does not say what it was trained on; go on with it for a step, and give what that saves."
        )
    data = rebuilt_data(record["recipe"])
    assert isinstance(data, PairDataModule)
    data.prepare_data()
    data.setup("fit")
    return data
