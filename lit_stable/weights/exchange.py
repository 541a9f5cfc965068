"""From a checkpoint to a folder of `transformers`, and back; of both `transformers` itself is not needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from lit_stable.callbacks.checkpoint_files import partial_path
from lit_stable.data.tokenizer import Tokenizer
from lit_stable.model.config import GPTConfig
from lit_stable.model.same_model import model_record
from lit_stable.weights.families import FAMILIES, FamilyName, closest_family, export_problems, import_problems
from lit_stable.weights.family_names import from_family, has_biases, to_family
from lit_stable.weights.hf_folder import read_folder, write_folder
from lit_stable.weights.stored_model import build_model, open_model, refuse_existing, write_weights

RECORD = "lit_stable"  # our options within a config.json, where transformers carries them along unread


def export_to_hf(
    path: Path, out: Path, family: FamilyName | None = None, tokenizer: Tokenizer | None = None
) -> list[str]:
    """Write a checkpoint's model as a folder that ``AutoModelForCausalLM.from_pretrained`` reads.

    Args:
        path: The checkpoint.
        out: The folder to write.
        family: As what; ``None``: as what its positions point to.
        tokenizer: To put beside it.

    Returns:
        Lines for people.

    Raises:
        ValueError: with a line for each option that has no counterpart there.
    """
    refuse_existing(out)
    stored = open_model(path)
    kind = closest_family(stored.config) if family is None else FAMILIES[family]
    if problems := export_problems(stored.config, kind):
        raise ValueError("\n".join(problems))
    weights = stored.weights()
    tensors = to_family(weights, kind, stored.config)
    dtype = str(Counter(tensor.dtype for tensor in weights.values()).most_common(1)[0][0]).removeprefix("torch.")
    settings = {
        **kind.settings(stored.config),
        **{"model_type": kind.name, "architectures": [kind.architecture], "vocab_size": stored.config.vocab_size},
        **{"tie_word_embeddings": stored.config.tied, "torch_dtype": dtype},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        RECORD: model_record(replace(stored.config, norm_gain="one")),
    }
    write_folder(out, settings, tensors, tokenizer)
    lines = [f"{out}: {kind.architecture}, {len(tensors)} tensors in {dtype}, from step {stored.step} of {path}"]
    if not stored.config.bias and any(name.endswith("bias") for name in tensors):
        lines.append("biases: the model has none and this architecture does; they are zeros.")
    if stored.config.norm_gain == "zero_centred":
        lines.append("norm gains: stored as gain - 1 in the checkpoint and as gain there.")
    return lines


def import_from_hf(folder: Path, out: Path) -> list[str]:
    """Write a checkpoint of weights alone, and beside it a recipe of its model, from a folder of `transformers`.

    Args:
        folder: With config.json and weights, of GPT-2, OPT, BLOOM or Llama.
        out: The checkpoint to write; the recipe gets the same name with ``.yaml``.

    Returns:
        Lines for people.

    Raises:
        ValueError: when a setting has no counterpart here, or weights do not belong to the settings.
    """
    recipe = out.with_suffix(".yaml")
    refuse_existing(out)
    refuse_existing(recipe)
    settings, tensors = read_folder(folder)
    if problems := import_problems(settings):
        raise ValueError("\n".join(f"{folder / 'config.json'}: {problem}" for problem in problems))
    kind = FAMILIES[settings["model_type"]]
    recorded = settings.get(RECORD, {})
    options = {**recorded, **kind.options(settings)}
    config = GPTConfig(**{**options, "bias": bool(recorded.get("bias")) or has_biases(tensors)})
    write_weights(out, config, from_family(tensors, kind, config), imported=str(folder))
    partial_path(recipe).write_text(yaml.safe_dump({"model": {"gpt": _said(config)}}, sort_keys=False))
    partial_path(recipe).replace(recipe)
    return [f"{out}: {config}", f"{recipe}: its model, for --config"]


def _said(config: GPTConfig) -> dict[str, Any]:
    """The options of a model that are not at their default."""
    default = model_record(GPTConfig())
    return {name: value for name, value in model_record(config).items() if value != default[name]}


@dataclass(frozen=True)
class Comparison:
    """How far the logits of a checkpoint and of the exported folder are apart."""

    largest: float
    """Largest difference over all tokens."""
    of: float
    """Largest logit, for scale."""

    @property
    def equal(self) -> bool:
        """Whether both are one model: apart by 1e-5 of the largest logit, or of 1, at most. NaN is not."""
        return self.largest <= 1e-5 * max(1.0, self.of)


def compare_logits(path: Path, folder: Path, tokens: int = 16) -> Comparison:
    """Run both on the same tokens, in fp32; needs `transformers`.

    Raises:
        ValueError: when `transformers` is not there.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError("compare=True: is done with transformers; pip install 'lit-stable[hf]'.") from error
    stored = open_model(path)
    length = min(tokens, stored.config.max_length)
    ids = torch.randint(stored.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    load: Any = AutoModelForCausalLM.from_pretrained  # whose types differ between versions
    there = load(folder).float().eval()
    with torch.no_grad():
        own, other = build_model(stored)(ids).float(), there(ids).logits.float()
    return Comparison(float((own - other).abs().max()), float(own.abs().max()))
