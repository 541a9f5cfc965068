"""An estimate of the memory that training takes on one device, from the shape of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lit_stable.model.attention_kernels import choose_kernel
from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import block_norms, mlp_inputs, parameter_count
from lit_stable.model.recompute import Recompute


def memory_per_device(
    config: GPTConfig,
    *,
    micro_batch: int,
    length: int,
    shards: int,
    width: int,
    recompute: Recompute,
    stored: int = 4,
    weight_bytes: float | None = None,
    gradient_bytes: float | None = None,
    state_bytes: float | None = None,
    tensor_parallel: int = 1,
    compiled: bool = True,
    copies: Literal["none", "some", "all"] = "none",
    accumulates: bool = True,
    head_makes_losses: bool = True,
) -> dict[str, float]:
    """Bytes by what they hold: weights, gradients, optimizer states (all sharded); copied weights, activations, logits.

    Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for a flash-style attention, which keeps
    no attention matrix: per layer the inputs of norms, linears and non-linearities that the backward pass reads. Under
    ``recompute`` only each block's input is kept, with ``selective`` also the attention's output and the products
    before attention and MLP, and one block's activations exist at a time. Where the options leave no such kernel (see
    `choose_kernel`), scores and masks are counted too. Kernel workspaces, the allocator's slack and communication
    buffers are not.

    Args:
        shards: Devices that share the weights; 1 when each holds them whole.
        width: Bytes of an activation: 2 in 16 bits, else 4.
        recompute: Activation checkpointing.
        stored: Bytes of a stored weight, gradient or moment.
        weight_bytes: Of the weights over all shards; ``None``: ``stored`` bytes per parameter of the GPT.
        gradient_bytes: Of the gradients over all shards; ``None``: ``stored`` bytes per parameter.
        state_bytes: Of the optimizer states over all shards; ``None``: two moments of ``stored`` bytes.
        tensor_parallel: Devices that split the inside of the sub-layers; logits are gathered on each.
        compiled: Whether blocks are compiled, on CUDA.
        copies: Weights that a device also holds in ``width`` bytes at the peak of activations, gathered by FSDP or
            rounded by autocast for the backward pass: ``none``; ``some``, those outside of the blocks and of two
            blocks, the one that computes and the next, which is being gathered; or ``all``.
        accumulates: Whether a step has several micro-batches, so that gradients exist while activations do. If not,
            gradients take the room of activations and logits as these are freed; what they take beyond that counts.
        head_makes_losses: Whether training hands the head the labels, so that `HeadLoss` is used where it can be.
    """
    parameters = parameter_count(config)
    one_block = parameter_count(replace(config, n_layer=config.n_layer + 1)) - parameters
    copied = {"none": 0, "some": parameters - max(config.n_layer - 2, 0) * one_block, "all": parameters}[copies]
    tokens = micro_batch * length
    block = tokens * _block_bytes_per_token(config, length, width, tensor_parallel, compiled)
    stream = 4 if config.residual_fp32 else width
    kept = config.n_layer * block
    if recompute:
        inside = _selective_bytes_per_token(config, width, tensor_parallel) if recompute == "selective" else 0
        kept = config.n_layer * tokens * (config.d_model * stream + inside) + block
    kept += _mask_bytes(config, micro_batch, length, compiled)
    in_one_node = head_makes_losses and config.logit_soft_cap is None and width == 2 and tensor_parallel == 1
    logits = _logit_bytes(config, tokens * config.vocab_size, width, in_one_node)
    every_weight = stored * parameters
    gradients = (every_weight if gradient_bytes is None else gradient_bytes) / shards
    return {
        "weights": (every_weight if weight_bytes is None else weight_bytes) / shards,
        "gradients": gradients if accumulates else max(gradients - kept - logits, 0),
        "optimizer states": (2 * every_weight if state_bytes is None else state_bytes) / shards,
        **({"copies of weights": width * copied / tensor_parallel} if copied else {}),
        "activations": kept,
        "logits": logits,
    }


def _logit_bytes(config: GPTConfig, count: int, width: int, in_one_node: bool) -> float:
    """Of ``count`` logits, over which the loss writes their gradient on CUDA; ``in_one_node``: as `HeadLoss` does."""
    if in_one_node:
        return width * count
    logit = 4 if config.head_fp32 else width
    return count * (logit + (4 + logit if config.logit_soft_cap is not None else 0))  # a cap's tanh, those before it


def _block_bytes_per_token(config: GPTConfig, length: int, width: int, tensor_parallel: int, compiled: bool) -> float:
    d, stream = config.d_model, 4 if config.residual_fp32 else width
    # Input and output of each norm. Uncompiled, and where the residual stream is in fp32, its input is kept in fp32.
    norms = block_norms(config) * d * ((stream if compiled else 4) + width)
    heads = _head_bytes_per_token(config, width)
    if config.qk_norm != "none":
        heads += (1 + config.kv_heads / config.n_head) * d * width
    if config.norm_position == "normformer":  # the norm inside the MLP, whole on every device as the others are
        norms += config.hidden * width
    inner = config.hidden * width * (1 + mlp_inputs(config))  # before and after the non-linearity
    masks = 2 * d if config.dropout_of("residual") else 0  # one byte per element dropped or not, twice a block
    return norms + masks + (heads + inner + _score_bytes(config, length, width, compiled)) / tensor_parallel


def _head_bytes_per_token(config: GPTConfig, width: int) -> float:
    """Of queries and attention's output, keys and values."""
    return (2 + 2 * config.kv_heads / config.n_head) * config.d_model * width


def _selective_bytes_per_token(config: GPTConfig, width: int, tensor_parallel: int) -> float:
    """Of what ``recompute: selective`` keeps of a block besides its input.

    It keeps every other matrix product, so of a gated MLP, which has three, also the last: the row-parallel output,
    which has full width on every tensor-parallel device.
    """
    out = config.d_model * width if config.mlp == "swiglu" else 0
    return (_head_bytes_per_token(config, width) + config.hidden * width) / tensor_parallel + out


def _score_bytes(config: GPTConfig, length: int, width: int, compiled: bool) -> float:
    """Of one query's scores over all heads, where they are written out: softmax in fp32, its copy for the product."""
    if _kernel(config, compiled) != "explicit":
        return 0
    drops, capped = config.dropout_of("attention") > 0, config.attention_soft_cap is not None
    return config.n_head * length * (4 + width + (5 if drops else 0) + (4 if capped else 0))


def _mask_bytes(config: GPTConfig, micro_batch: int, length: int, compiled: bool) -> float:
    """Of the mask that all blocks share."""
    if _kernel(config, compiled) not in ("masked", "explicit"):
        return 0
    samples = micro_batch if config.document_mask else 1
    return samples * length * length * (4 * config.n_head if config.position == "alibi" else 1)


def _kernel(config: GPTConfig, compiled: bool) -> str:
    drops = config.dropout_of("attention") > 0
    return choose_kernel(config, documents=config.document_mask, device_type="cuda", compiled=compiled, drops=drops)
