"""An estimate of the memory that training takes on one device, from the shape of the model."""

from __future__ import annotations

from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import parameter_count


def memory_per_device(
    config: GPTConfig,
    *,
    micro_batch: int,
    length: int,
    shards: int,
    width: int,
    recompute: bool,
    stored: int = 4,
    state_bytes: int | None = None,
    tensor_parallel: int = 1,
) -> dict[str, float]:
    """Bytes by what they hold: weights, gradients, optimizer states (all sharded), activations, logits.

    Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for a flash-style attention, which keeps
    no attention matrix: per layer the inputs of norms, linears and non-linearities that the backward pass reads. Under
    ``recompute`` only each block's input is kept, and one block's activations exist at a time. Kernel workspaces, the
    allocator's slack and communication buffers are not counted.

    Args:
        shards: Devices that share the weights; 1 when each holds them whole.
        width: Bytes of an activation: 2 in 16 bits, else 4.
        recompute: Activation checkpointing.
        stored: Bytes of a stored weight, gradient or moment.
        state_bytes: Of the optimizer states over all shards; ``None``: two moments of ``stored`` bytes.
        tensor_parallel: Devices that split the inside of the sub-layers; logits are gathered on each.
    """
    parameters = parameter_count(config)
    tokens = micro_batch * length
    # Per token and layer, in units of d_model: two norm inputs and outputs (4), q, k, v and attention output (4), and
    # the MLP's inner activations before and after the non-linearity. The norms see the whole on every device.
    inner = config.hidden / config.d_model * (3 if config.mlp == "swiglu" else 2)
    block = tokens * config.d_model * width * (4 + (4 + inner) / tensor_parallel)
    kept = config.n_layer * tokens * config.d_model * width + block if recompute else config.n_layer * block
    return {
        "weights": stored * parameters / shards,
        "gradients": stored * parameters / shards,
        "optimizer states": (2 * stored * parameters if state_bytes is None else state_bytes) / shards,
        "activations": kept,
        # The logits, their gradient, and the fp32 copy that the loss reads.
        "logits": tokens * config.vocab_size * (2 * width + 4),
    }
