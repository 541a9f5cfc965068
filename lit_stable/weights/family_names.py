"""The weights of a GPT under the names and in the layout of a family of `transformers`, and back.

The rows of our fused projection run group by group: a group's queries, its key, its value. Every change here moves
numbers and computes none, so that there and back is the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_stable.model.config import GPTConfig
from lit_stable.weights.families import Family

# D d_model, H query heads, G key and value heads, K head size

_OPT_OFFSET = 2  # rows before position 0 in its table, which no token of a sequence without padding uses


def _one(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def _same(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0]


@dataclass(frozen=True)
class Renamed:
    """One weight here, one or more there."""

    ours: str
    theirs: tuple[str, ...]
    there: Callable[[Tensor], tuple[Tensor, ...]] = _one
    back: Callable[[tuple[Tensor, ...]], Tensor] = _same


def renamings(family: Family, config: GPTConfig) -> list[Renamed]:
    """All weights of a model with biases wherever the family may have them; a tied head is not among them."""
    blocks, ends, top, norm_bias = _PARTS[family.name]
    found = []
    for number in range(config.n_layer):
        found += [
            Renamed(
                f"blocks.{number}.{one.ours}", tuple(name.format(number) for name in one.theirs), one.there, one.back
            )
            for one in _with_biases(blocks(config), norm_bias)
        ]
    found += _with_biases(ends, norm_bias)
    if not config.tied:
        found.append(Renamed("head.weight", (top,)))
    return found


def to_family(weights: Mapping[str, Tensor], family: Family, config: GPTConfig) -> dict[str, Tensor]:
    """The weights of a GPT as a family has them; biases that the model lacks and the family has not are zeros."""
    found: dict[str, Tensor] = {}
    for one in renamings(family, config):
        if one.ours in weights:
            tensor = weights[one.ours]
            if config.norm_gain == "zero_centred" and "norm" in one.ours and one.ours.endswith("weight"):
                tensor = (1.0 + tensor.float()).to(tensor.dtype)  # the factor that it means
        elif _has_bias(family, one.ours, config):
            gain = weights[one.ours.removesuffix("bias") + "weight"]
            tensor = torch.zeros(gain.shape[0], dtype=gain.dtype)
        else:
            continue
        found.update({name: t.contiguous() for name, t in zip(one.theirs, one.there(tensor), strict=True)})
    return found


def from_family(tensors: Mapping[str, Tensor], family: Family, config: GPTConfig) -> dict[str, Tensor]:
    """The weights of a family as a GPT has them; with ``config.bias`` biases that the family lacks are zeros.

    Raises:
        ValueError: when a weight is missing or left over, or a bias is not zero and the model has none.
    """
    tensors = {_plain(name): tensor for name, tensor in tensors.items() if not name.endswith(_BUFFERS)}
    found: dict[str, Tensor] = {}
    for one in renamings(family, config):
        names = [_plain(name) for name in one.theirs]
        parts = tuple(tensors.pop(name) for name in names if name in tensors)
        is_bias = one.ours.endswith("bias")
        if len(parts) < len(names):
            if not is_bias or parts:
                raise ValueError(f"{one.theirs[len(parts)]}: is missing among the weights.")
            if config.bias:
                gain = found[one.ours.removesuffix("bias") + "weight"]
                found[one.ours] = torch.zeros(gain.shape[0], dtype=gain.dtype)
        elif is_bias and not config.bias:
            if any(part.any() for part in parts):
                raise ValueError(f"{one.theirs[0]}: is not zero, and the model has no biases.")
        else:
            found[one.ours] = one.back(parts)
    tensors.pop(_plain(_PARTS[family.name][2]), None)  # a tied head that was written all the same
    if tensors:
        raise ValueError(f"{next(iter(tensors))}: is no weight of a {family.architecture} that is read here.")
    return found


def has_biases(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any bias among a family's tensors is not zero."""
    return any(
        tensor.any() for name, tensor in tensors.items() if name.endswith("bias") and not name.endswith(_BUFFERS)
    )


# What is stored beside weights by some versions.
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


def _plain(name: str) -> str:
    """A name without the prefixes that a model without its head is stored without."""
    for prefix in ("transformer.", "model.decoder.", "decoder.", "model."):
        name = name.removeprefix(prefix)
    return name


def _has_bias(family: Family, ours: str, config: GPTConfig) -> bool:
    """Whether a family has a bias that a model without biases lacks."""
    if not ours.endswith("bias") or family.name == "llama":
        return False
    return family.name != "opt" or "norm" in ours  # OPT can leave out those of linear layers


def _with_biases(weights: list[Renamed], norm_bias: bool) -> Iterator[Renamed]:
    for one in weights:
        yield one
        if one.ours in ("wte.weight", "wpe.weight") or ("norm" in one.ours and not norm_bias):
            continue
        names = tuple(name.removesuffix("weight") + "bias" for name in one.theirs)
        # A table is transposed, a bias is not.
        there, back = (_one, _same) if one.there is _transposed else (one.there, one.back)
        yield Renamed(one.ours.removesuffix("weight") + "bias", names, there, back)


def _transposed(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor.T,)


def _transposed_back(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0].T.contiguous()


def _apart(config: GPTConfig) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[[tuple[Tensor, ...]], Tensor]]:
    """Between the fused rows and those of queries, keys and values, each of all heads."""
    size, queries = config.head_size, config.n_head // config.kv_heads

    def there(rows: Tensor) -> tuple[Tensor, ...]:
        groups = rows.reshape(config.kv_heads, queries + 2, size, *rows.shape[1:])  # (G, H/G + 2, K, ...)
        q, k, v = groups[:, :queries], groups[:, queries : queries + 1], groups[:, queries + 1 :]
        return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)

    def back(parts: tuple[Tensor, ...]) -> Tensor:
        q, k, v = (part.reshape(config.kv_heads, -1, size, *part.shape[1:]) for part in parts)
        return torch.cat((q, k, v), dim=1).flatten(0, 2)

    return there, back


def _gpt2(config: GPTConfig) -> list[Renamed]:
    apart, together = _apart(config)

    def there(rows: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(apart(rows)).t(),)  # (D, 3 D); of a bias (3 D,)

    def back(tensors: tuple[Tensor, ...]) -> Tensor:
        return together(tensors[0].t().chunk(3))

    return [
        Renamed("attention_norm.weight", ("transformer.h.{}.ln_1.weight",)),
        Renamed("attention.qkv.weight", ("transformer.h.{}.attn.c_attn.weight",), there, back),
        Renamed("attention.out.weight", ("transformer.h.{}.attn.c_proj.weight",), _transposed, _transposed_back),
        Renamed("mlp_norm.weight", ("transformer.h.{}.ln_2.weight",)),
        Renamed("mlp.up.weight", ("transformer.h.{}.mlp.c_fc.weight",), _transposed, _transposed_back),
        Renamed("mlp.down.weight", ("transformer.h.{}.mlp.c_proj.weight",), _transposed, _transposed_back),
    ]


def _opt(config: GPTConfig) -> list[Renamed]:
    layer = "model.decoder.layers.{}"
    return [
        Renamed("attention_norm.weight", (f"{layer}.self_attn_layer_norm.weight",)),
        Renamed("attention.qkv.weight", tuple(f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"), *_apart(config)),
        Renamed("attention.out.weight", (f"{layer}.self_attn.out_proj.weight",)),
        Renamed("mlp_norm.weight", (f"{layer}.final_layer_norm.weight",)),
        Renamed("mlp.up.weight", (f"{layer}.fc1.weight",)),
        Renamed("mlp.down.weight", (f"{layer}.fc2.weight",)),
    ]


def _bloom(config: GPTConfig) -> list[Renamed]:
    layer = "transformer.h.{}"
    return [
        Renamed("attention_norm.weight", (f"{layer}.input_layernorm.weight",)),
        Renamed("attention.qkv.weight", (f"{layer}.self_attention.query_key_value.weight",)),  # also head by head
        Renamed("attention.out.weight", (f"{layer}.self_attention.dense.weight",)),
        Renamed("mlp_norm.weight", (f"{layer}.post_attention_layernorm.weight",)),
        Renamed("mlp.up.weight", (f"{layer}.mlp.dense_h_to_4h.weight",)),
        Renamed("mlp.down.weight", (f"{layer}.mlp.dense_4h_to_h.weight",)),
    ]


def _llama(config: GPTConfig) -> list[Renamed]:
    layer = "model.layers.{}"
    return [
        Renamed("attention_norm.weight", (f"{layer}.input_layernorm.weight",)),
        Renamed("attention.qkv.weight", tuple(f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"), *_apart(config)),
        Renamed("attention.out.weight", (f"{layer}.self_attn.o_proj.weight",)),
        Renamed("mlp_norm.weight", (f"{layer}.post_attention_layernorm.weight",)),
        Renamed("mlp.gate.weight", (f"{layer}.mlp.gate_proj.weight",)),
        Renamed("mlp.up.weight", (f"{layer}.mlp.up_proj.weight",)),
        Renamed("mlp.down.weight", (f"{layer}.mlp.down_proj.weight",)),
    ]


def _positions_there(table: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat((table.new_zeros(_OPT_OFFSET, table.shape[1]), table)),)


def _positions_back(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0][_OPT_OFFSET:].clone()


_GPT2_ENDS = [
    Renamed("wte.weight", ("transformer.wte.weight",)),
    Renamed("wpe.weight", ("transformer.wpe.weight",)),
    Renamed("norm.weight", ("transformer.ln_f.weight",)),
]
_OPT_ENDS = [
    Renamed("wte.weight", ("model.decoder.embed_tokens.weight",)),
    Renamed("wpe.weight", ("model.decoder.embed_positions.weight",), _positions_there, _positions_back),
    Renamed("norm.weight", ("model.decoder.final_layer_norm.weight",)),
]
_BLOOM_ENDS = [
    Renamed("wte.weight", ("transformer.word_embeddings.weight",)),
    Renamed("embed_norm.weight", ("transformer.word_embeddings_layernorm.weight",)),
    Renamed("norm.weight", ("transformer.ln_f.weight",)),
]
_LLAMA_ENDS = [
    Renamed("wte.weight", ("model.embed_tokens.weight",)),
    Renamed("norm.weight", ("model.norm.weight",)),
]

#: By family: a block, the rest, the head, whether norms have biases.
_PARTS: dict[str, tuple[Callable[[GPTConfig], list[Renamed]], list[Renamed], str, bool]] = {
    "gpt2": (_gpt2, _GPT2_ENDS, "lm_head.weight", True),
    "opt": (_opt, _OPT_ENDS, "lm_head.weight", True),
    "bloom": (_bloom, _BLOOM_ENDS, "lm_head.weight", True),
    "llama": (_llama, _LLAMA_ENDS, "lm_head.weight", False),
}
