"""What a run says on the screen: rank 0 only, one flushed line at a time."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from lit_stable.callbacks.base import rank_zero_only

_PACKAGE = Path(__file__).resolve().parent.parent
_CALLBACKS = (_PACKAGE / "callbacks").resolve()  # a link in a checkout
_BESIDE_THE_POINT = (
    ".*does not have many workers.*",  # reading a window costs microseconds
    ".*sync_dist=True.*",  # what we log is reduced over the ranks already
    ".*`isinstance\\(treespec, LeafSpec\\)`.*",  # inside Lightning
    ".*Precision bf16-mixed is not supported by the model summary.*",
    ".*returned a view tensor.*",  # of gathered logits, into which nobody writes
)


def quiet_lightning() -> None:
    """Let through of Lightning's log only warnings and what our callbacks say; its start-up notes repeat ours."""
    logging.getLogger("lightning.pytorch").addFilter(_is_ours_or_serious)
    for handler in logging.getLogger("lightning.pytorch").handlers:
        handler.addFilter(_is_ours_or_serious)
    # Gathering a whole tensor over two dimensions of a mesh takes two steps: every rank would say so.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for message in _BESIDE_THE_POINT:
        warnings.filterwarnings("ignore", message)
    _show_our_warnings_as_sentences()


def _is_ours_or_serious(record: logging.LogRecord) -> bool:
    origin = Path(record.pathname).resolve()
    return record.levelno >= logging.WARNING or bool({_PACKAGE, _CALLBACKS} & set(origin.parents))


def _show_our_warnings_as_sentences() -> None:
    """Without the file, the line and its source, which say nothing to whoever trains; others' stay as they are."""
    others = warnings.formatwarning
    if others.__name__ == "format_warning":
        return

    def format_warning(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        is_ours = {_PACKAGE, _CALLBACKS} & set(Path(filename).resolve().parents)
        return f"{message}\n" if is_ours else others(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning


@rank_zero_only
def say(text: str) -> None:
    """Print on rank 0, at once."""
    print(text, flush=True)


def human_count(count: float) -> str:
    """A count with three digits and a suffix: 2_340_000 -> ``2.34M``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.3g}"


def human_bytes(size: float) -> str:
    """Bytes with three digits and a binary suffix: 3_221_225_472 -> ``3 GiB``."""
    for limit, suffix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= limit:
            return f"{size / limit:.3g} {suffix}"
    return f"{size:.0f} B"
