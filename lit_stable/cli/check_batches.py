"""What `lit-stable check` says about steps and tokens: constant, under a batch-size ramp, under growing lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from lightning.pytorch import Callback

from lit_stable.callbacks import BatchSizeWarmup, SequenceLengthWarmup
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.model.formulas import flops_per_token
from lit_stable.module import GPTModule


def batches(
    module: GPTModule, data: TokenDataModule, features: Mapping[str, Callback], ranks: int, max_steps: int
) -> str:
    """Lines about one full step, the ramps to it, and the whole run, on so many data-parallel ranks."""
    ramp = next((f for f in features.values() if isinstance(f, BatchSizeWarmup)), None)
    lengths = next((f for f in features.values() if isinstance(f, SequenceLengthWarmup)), None)
    lines = [
        f"step: {data.global_batch} samples x {data.sequence_length} = {data.global_batch * data.sequence_length:,}"
        f" tokens, as {data.accumulation(ranks)} micro-batches of {data.micro_batch} on each of {ranks} data-parallel"
        " ranks"
    ]
    if ramp is not None:
        lines.append(_ramp(ramp, ranks))
    if lengths is not None:
        lines.append(_lengths(lengths))
    if max_steps > 0:
        samples_before = data.samples_before if ramp is None else ramp.samples_before
        tokens = tokens_by_length(samples_before, lengths, data.sequence_length, max_steps)
        flops = sum(count * flops_per_token(module.config, length) for length, count in tokens.items())
        lines.append(f"run: {max_steps:,} steps, {sum(tokens.values()):,} tokens, {flops:.3g} FLOPs")
    return "\n".join(lines)


def tokens_by_length(
    samples_before: Callable[[int], int], lengths: SequenceLengthWarmup | None, full_length: int, max_steps: int
) -> Counter[int]:
    """Tokens that steps 1 to ``max_steps`` train on, by the length of the sequences they stand in."""
    tokens: Counter[int] = Counter()
    step = 1
    while step <= max_steps and lengths is not None and lengths.length(step) < full_length:
        length = lengths.length(step)
        tokens[length] += lengths.tokens_in(samples_before(step + 1) - samples_before(step), step)
        step += 1
    tokens[full_length] += (samples_before(max_steps + 1) - samples_before(step)) * full_length
    return tokens


def _ramp(ramp: BatchSizeWarmup, ranks: int) -> str:
    stages = ramp.schedule.reached()
    shown = stages if len(stages) <= 6 else [*stages[:3], None, stages[-1]]
    parts = []
    for stage in shown:
        if stage is None:
            parts.append("...")
            continue
        micro_batch = ramp.window_at(stage.mark, ranks)[1]
        parts.append(f"{stage.batch} ({micro_batch} at once) from step {stage.step + 1:,}")
    last = stages[-1]
    return f"batch size: {', '.join(parts)}; {last.samples:,} samples before the full batch"


def _lengths(warmup: SequenceLengthWarmup) -> str:
    distinct = warmup.lengths.distinct()
    return (
        f"sequence length: {warmup.mode} to {warmup.length(1)} at step 1, {warmup.lengths.longest} in the end;"
        f" {len(distinct)} distinct lengths"
    )
