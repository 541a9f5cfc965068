"""Make the optimizer that the options ask for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lit_stable.optim.groups import parameter_groups
from lit_stable.optim.options import OptimizerOptions


def optimizer_groups(module: nn.Module, options: OptimizerOptions) -> list[dict[str, Any]]:
    """The parameter groups that the options ask for.

    Raises:
        ValueError: when a pattern is left with no parameter.
    """
    return parameter_groups(
        module, options.weight_decay, options.decay_embeddings, options.decay_norms, options.patterns
    )


def build_optimizer(module: nn.Module, options: OptimizerOptions, lr: float) -> Optimizer:
    """An optimizer over the trainable parameters of ``module``, each group at ``lr`` times its factor.

    Adam and AdamW are fused. SGD is not: torch's fused kernel knows no sharded tensors.
    """
    groups = [{**group, "lr": lr * group.get("lr_factor", 1.0)} for group in optimizer_groups(module, options)]
    optimizer: Optimizer
    if options.name == "sgd":
        optimizer = SGD(groups, lr=lr, momentum=options.momentum, foreach=True)
    else:
        kind = AdamW if options.name == "adamw" else Adam
        optimizer = kind(groups, lr=lr, betas=options.betas, eps=options.eps, fused=True)
    return optimizer
