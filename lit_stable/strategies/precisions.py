"""Which precision trains under which strategy, and why not where it does not."""

from __future__ import annotations

STRATEGIES = ("auto", "ddp", "fsdp2", "fsdp2_full", "fsdp")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
FP16 = ("16-mixed", "16-true")
"""Precisions with a loss scale."""

_ALIASES = {"None": "32-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}

BF16_TRUE_WARNING = (
    "precision=bf16-true: weights and Adam's moments are stored in bf16, where neighbours of 1.0 lie 1/128 apart: at"
    " ordinary learning rates a norm gain stays at exactly 1.0 for ever, and small updates of other weights are lost"
    " as well. bf16-mixed computes in bf16 too and stores fp32."
)


def full_name(precision: str | int | None) -> str:
    """A precision by the one name that it has here; what is not known comes back as it is."""
    return _ALIASES.get(str(precision), str(precision))


def precision_problem(strategy: str, precision: str | int | None) -> str | None:
    """Why a strategy, by the name in a recipe or of its class, does not train in a precision; ``None``: it does."""
    name = full_name(precision)
    if name not in PRECISIONS:
        return f"trainer.precision={precision}: must be one of {', '.join(PRECISIONS)}."
    if name == "16-true" and not strategy.lower().startswith("fsdp2"):
        return (
            f"trainer.precision=16-true: strategy {strategy} would store the weights themselves in fp16, where most"
            " updates round to nothing; take strategy fsdp2, which keeps fp32 shards, or 16-mixed."
        )
    return None
