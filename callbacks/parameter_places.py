"""What a parameter's name says of where it stands: its layer, and its component, which is the same in all layers."""

from __future__ import annotations


def layer_of(name: str) -> str:
    """The name up to and with its first number; of a parameter that stands in no numbered layer, its module.

    Example::

        >>> layer_of("gpt.blocks.3.attention.out.weight"), layer_of("gpt.wte.weight")
        ('gpt.blocks.3', 'gpt.wte')
    """
    parts = name.split(".")
    number = _first_number(parts)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1]) or name


def layer_of_module(name: str) -> str:
    """The name of a module up to and with its first number; of one that stands in no numbered layer, all of it.

    Example::

        >>> layer_of_module("gpt.blocks.3.attention"), layer_of_module("gpt.wte"), layer_of_module("")
        ('gpt.blocks.3', 'gpt.wte', '')
    """
    parts = name.split(".")
    number = _first_number(parts)
    return name if number is None else ".".join(parts[: number + 1])


def component_of(name: str) -> str:
    """The name without its first number: one component for all layers.

    Example::

        >>> component_of("gpt.blocks.3.attention.out.weight"), component_of("gpt.wte.weight")
        ('gpt.blocks.attention.out.weight', 'gpt.wte.weight')
    """
    parts = name.split(".")
    number = _first_number(parts)
    return ".".join(part for index, part in enumerate(parts) if index != number)


def _first_number(parts: list[str]) -> int | None:
    return next((index for index, part in enumerate(parts) if part.isdigit()), None)
