"""From a checkpoint to a folder of `transformers`, and back; of both `transformers` itself is not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lit_stable.callbacks.whole_file import write_whole
from lit_stable.data.tokenizer import Tokenizer
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.same_model import model_record
from lit_stable.weights.families import FAMILIES, Family, FamilyName, closest_family, export_problems, import_problems
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
    refuse_existing(out)
    recipe = out.with_suffix(".yaml")
    if recipe == out:
        raise ValueError(
            f"out={out}: is the name that its recipe gets; name a checkpoint, as {out.with_suffix('.ckpt')}."
        )
    refuse_existing(recipe)
    settings, tensors = read_folder(folder)
    if problems := import_problems(settings):
        raise ValueError("\n".join(f"{folder / 'config.json'}: {problem}" for problem in problems))
    kind = FAMILIES[settings["model_type"]]
    config = _config(folder / "config.json", settings, kind, has_biases(tensors))
    weights = _weights(folder, tensors, kind, config)
    write_weights(out, config, weights, imported=str(folder))
    try:
        write_whole(recipe, yaml.safe_dump({"model": {"gpt": _said(config)}}, sort_keys=False))
    except OSError:
        out.unlink()  # alone it would stand in the way of the same command given again
        raise
    return [f"{out}: {config}", f"{recipe}: its model, for --config"]


def _config(path: Path, settings: dict[str, Any], kind: Family, has_biases: bool) -> GPTConfig:
    """The options of a model that a config.json describes."""
    recorded = settings.get(RECORD) or {}
    if not isinstance(recorded, dict):
        raise ValueError(f"{path}: {RECORD}={recorded!r}: must be a mapping, as export writes it; take it out.")
    if unknown := [name for name in recorded if name not in GPTConfig.__dataclass_fields__]:
        raise ValueError(f"{path}: {RECORD}.{unknown[0]}: is no option of a model here; upgrade lit-stable.")
    try:
        options = {**recorded, **kind.options(settings)}
        return GPTConfig(**{**options, "bias": bool(recorded.get("bias")) or has_biases})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: describes no model that there can be ({_one_line(error)}); mend it.") from error


def _weights(folder: Path, tensors: Mapping[str, Tensor], kind: Family, config: GPTConfig) -> dict[str, Tensor]:
    """The weights as a GPT has them, each of the shape that the settings say."""
    _refuse_too_many_layers(folder, tensors, config)
    try:
        weights = from_family(tensors, kind, config)
    except RuntimeError as error:  # torch cannot put them into the layout of such a model
        raise ValueError(
            f"{folder}: its weights have not the shapes that config.json says ({_one_line(error)}); give the"
            " config.json that belongs to them."
        ) from error
    with torch.device("meta"):
        wanted = {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}
    for name, tensor in weights.items():
        if name in wanted and tuple(tensor.shape) != wanted[name]:
            raise ValueError(
                f"{folder}: {name} has shape {tuple(tensor.shape)} among its weights and {wanted[name]} by its"
                " config.json; give the config.json that belongs to them."
            )
    if wrong := sorted(weights.keys() ^ wanted.keys()):
        raise ValueError(f"{folder}: its weight {wrong[0]} does not belong to the model that its config.json says.")
    return weights


def _refuse_too_many_layers(folder: Path, tensors: Mapping[str, Tensor], config: GPTConfig) -> None:
    # Each has weights of its own; a number with digits too many would be counted through for hours.
    if config.n_layer > len(tensors):
        raise ValueError(
            f"{folder / 'config.json'}: describes {config.n_layer} layers, and there are {len(tensors)} weights in all;"
            " give the config.json that belongs to them."
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


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
