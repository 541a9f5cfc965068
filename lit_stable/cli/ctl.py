"""`lit-stable ctl RUN ORDER`: steer a run under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_stable.callbacks.control_orders import INBOX, LEDGER, Done, new_order, place, read_ledger
from lit_stable.run.branch import stored_recipes
from lit_stable.run.under_way import is_free

_POLL = 0.2  # seconds


def run_ctl(argv: Sequence[str]) -> int:
    """Parse the arguments of ``ctl``, give the order, and say what became of it; 1 where nobody takes it."""
    parser = ArgumentParser(
        prog="lit-stable ctl",
        description="Give an order to a run under way. All ranks carry it out at one step boundary, and it is written"
        f" into RUN/{LEDGER}.",
    )
    parser.add_argument("run", type=Path, help="Run folder, as runs/quickstart/0001.")
    parser.add_argument("order", type=str, help="save, stop, validate, or 'lr*=0.67' (quote the asterisk).")
    parser.add_argument("--wait", type=float, default=0.0, help="Seconds to wait until it is carried out.")
    arguments = parser.parse_args(list(argv))
    page, heard = give_order(arguments.run, arguments.order, arguments.wait)
    print(page)
    return 0 if heard else 1


def give_order(run: Path, words: str, wait: float = 0.0) -> tuple[str, bool]:
    """Place an order and wait for it.

    Returns:
        What to print; and whether the order was carried out or, if that was not waited for, whether it will be, as far
        as is known.

    Raises:
        ValueError: when the folder is no run's, or cannot be written to, the words are no order, or ``wait`` is
            negative.
    """
    if not stored_recipes(run):
        raise ValueError(f"{run}: holds no recipe-NN.yaml, so it is no run folder; give ROOT/NAME/0001.")
    if wait < 0:
        raise ValueError(f"wait={wait:g}: must be 0 or more seconds.")
    order = new_order(words)
    try:
        path = place(run, order)
    except OSError as error:
        raise ValueError(
            f"{run / INBOX}: the order cannot be written there ({error.strerror}); mend that, or give it as the user"
            " whose run it is."
        ) from error
    until = time.monotonic() + wait
    while (done := _carried_out(run, order.id)) is None and time.monotonic() < until:
        time.sleep(_POLL)
    if done is not None:
        return f"{words}: done after step {done.step}", True
    nobody = (
        "; no run is under way there as far as its lock tells, and the next to go on takes it" if is_free(run) else ""
    )
    if wait:
        return f"{words}: not carried out in {wait:g} s; it stays in {path} until the run takes it{nobody}.", False
    if nobody:
        return f"{words}: left in {path}{nobody}.", False
    return (
        f"{words}: left in {path}; the run takes it at its next step boundary and writes it into {run / LEDGER}",
        True,
    )


def _carried_out(run: Path, order: str) -> Done | None:
    return next((done for done in read_ledger(run) if done.id == order), None)
