"""`lit-stable ctl` against a run in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_recipe import command, start, write_recipe

from lit_stable.callbacks.control_orders import INBOX, new_order, place, read_ledger, waiting


def test_a_run_under_way_is_steered_and_stopped_and_goes_on(tmp_path: Path) -> None:
    endless = {"trainer__max_steps": 1_000_000, "model__schedule__horizon": 1_000_000}
    recipe = write_recipe(tmp_path, **endless, stability__black_box={"steps": 4})
    process = start("fit", "--config", recipe)
    for line in process.stdout:
        if line.startswith(b"saved "):
            break
    run = tmp_path / "runs" / "tiny" / "0001"
    twice = command("fit", "--config", recipe, "--resume", "auto")
    assert (twice.code, f"a run is under way there (process {process.pid} on " in twice.err) == (2, True), twice.err
    assert not (run / "blackbox").exists()  # nor does the one that is refused write its last words there
    assert command("ctl", run, "lr*=0.5", "--wait", "60").code == 0
    assert command("ctl", run, "validate").out.startswith("validate: left in ")
    assert command("ctl", run, "stop", "--wait", "60").out.startswith("stop: done after step ")
    out = process.stdout.read()
    assert process.wait() == 4, out.decode()
    assert [done.action for done in read_ledger(run)] == ["lr", "validate", "stop"]
    stopped = read_ledger(run)[-1].step
    assert (run / "checkpoints" / f"step-{stopped:08d}.ckpt").exists()
    words = ["fit", "--config", recipe, "--resume", "auto", "--trainer.max_steps", str(stopped + 2)]
    assert command(*words).code == 0
    assert command("ctl", run, "save").code == 1
    last = (run / "csv-02" / "metrics.csv").read_text().splitlines()
    factor = last[0].split(",").index("stability/control_lr_factor")
    assert {row.split(",")[factor] for row in last[1:]} - {""} == {"0.5"}
    (run / "STOP").touch()
    done = command(*words[:-1], str(stopped + 4))
    assert (done.code, "STOP: exists, and while it does nothing is trained" in done.err) == (4, True)


def test_what_is_no_run_or_no_order_is_refused(tmp_path: Path) -> None:
    done = command("ctl", tmp_path, "stop")
    assert (done.code, "holds no recipe-NN.yaml" in done.err) == (2, True)
    (tmp_path / "recipe-01.yaml").touch()
    assert command("ctl", tmp_path, "halt").code == 2
    done = command("ctl", tmp_path, "save", "--wait", "0.1")
    assert (done.code, "not carried out in 0.1 s" in done.out, "no run is under way there" in done.out) == (
        1,
        True,
        True,
    )
    assert len(list((tmp_path / INBOX).iterdir())) == 1


def test_an_order_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "recipe-01.yaml").touch()
    (tmp_path / INBOX).touch()  # no folder; as root writes anywhere, permissions would not do
    done = command("ctl", tmp_path, "stop")
    assert (done.code, done.err) == (
        2,
        f"lit-stable ctl: {tmp_path / INBOX}: the order cannot be written there (File exists); mend that, or give it as"
        " the user whose run it is.\n",
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "xx", "[1]", "{}", '{"id": 5, "action": "stop"}', '{"id": "a", "action": "halt"}'),
        *('{"id": "a", "action": "lr"}', '{"id": "a", "action": "lr", "factor": -5}'),
    ],
)
def test_what_is_no_order_is_named_and_those_behind_it_are_heard(tmp_path: Path, text: str) -> None:
    (tmp_path / INBOX).mkdir()
    (tmp_path / INBOX / "0.json").write_text(text)
    order = new_order("save")
    path = place(tmp_path, order)
    with pytest.warns(UserWarning, match=r"control/0\.json: is no order, and is removed; give one with `lit-stable"):
        assert waiting(tmp_path) == [(path, order)]
    assert waiting(tmp_path) == [(path, order)]


def test_a_folder_among_the_orders_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / INBOX / "x.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"control/x\.json: cannot be read \(Is a directory\), so it is no order"):
        assert waiting(tmp_path) == []


def test_to_wait_for_less_than_nothing_is_refused_and_no_order_left(tmp_path: Path) -> None:
    (tmp_path / "recipe-01.yaml").write_text("{}")
    done = command("ctl", tmp_path, "save", "--wait", "-1")
    assert (done.code, done.err) == (2, "lit-stable ctl: wait=-1: must be 0 or more seconds.\n")
    assert not (tmp_path / INBOX).exists()
