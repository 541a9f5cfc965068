"""Names of modules and parameters as they were before anything was wrapped."""

from __future__ import annotations

# Wrappers put these into module and parameter names: torch.compile, activation checkpointing, FSDP1.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrapped(name: str) -> str:
    """The name of a module or parameter as it was before anything was wrapped.

    Example::

        >>> unwrapped("net._orig_mod.0._checkpoint_wrapped_module.weight")
        'net.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)
