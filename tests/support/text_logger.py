"""A logger that takes numbers and text and keeps both."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger


class TextLogger(Logger):
    """Texts as (key, text, step), numbers as (step, by name)."""

    name, version = "own", 0

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str, int]] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_text(self, key: str, text: str, step: int) -> None:
        self.texts.append((key, text, step))
