from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import Alarm, Event, emit
from lit_stable.callbacks.base import MisconfigurationException


def fit(alarm: Alarm, *kinds: str) -> None:
    """A run in which these events happen, one a step."""

    def happen(trainer: Any, *rest: Any) -> None:
        emit(
            trainer, Event(trainer.global_step, kinds[trainer.global_step - 1], {"value": float("nan")}, samples=[1, 3])
        )

    trainer = quiet_trainer(alarm, Watch("on_train_batch_end", happen), max_steps=len(kinds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(TinyModule(), TinyData())


def keep_in(path: Path) -> str:
    """A command that appends its input to a file."""
    code = f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read() + chr(10))"
    return f'{sys.executable} -c "{code}"'


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_command_gets_each_event_as_json(tmp_path: Path) -> None:
    fit(Alarm(command=keep_in(tmp_path / "out"), every_seconds=0.0), "spike", "plateau")
    first, second = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (first["step"], first["kind"], first["evidence"]) == (1, "spike", {"value": "nan"})
    assert first["samples"] == [1, 3]
    assert first["text"] == "step 1: spike: value nan"
    assert (second["kind"], second["suppressed"]) == ("plateau", 0)


def test_what_comes_too_soon_is_counted_in_the_next(tmp_path: Path) -> None:
    alarm = Alarm(command=keep_in(tmp_path / "out"), every_seconds=3600.0)
    fit(alarm, "spike", "spike", "spike")
    alarm.every_seconds = 0.0
    fit(alarm, "spike")
    messages = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [m["suppressed"] for m in messages] == [0, 2]


def test_only_the_kinds_that_were_asked_for(tmp_path: Path) -> None:
    fit(Alarm(command=keep_in(tmp_path / "out"), kinds="pla* not_finite", every_seconds=0.0), "spike", "plateau")
    assert [json.loads(line)["kind"] for line in (tmp_path / "out").read_text().splitlines()] == ["plateau"]


@pytest.fixture
def posted() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Address of a server on this machine, and the (path, body) of what was posted to it."""
    bodies: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            bodies.append((self.path, json.loads(self.rfile.read(length))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}", bodies
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_it_with_its_secret_from_the_environment(
    posted: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, bodies = posted
    monkeypatch.setenv("ALARM_TOKEN", "s3cret")
    fit(Alarm(webhook=f"http://{address}/hook/${{ALARM_TOKEN}}"), "spike")
    ((path, body),) = bodies
    assert (path, body["kind"]) == ("/hook/s3cret", "spike")


def test_a_failure_is_a_warning_without_the_secret_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALARM_TOKEN", "s3cret")
    for alarm in (Alarm(webhook="http://127.0.0.1:9/${ALARM_TOKEN}"), Alarm(command="no-such-program ${ALARM_TOKEN}")):
        said: list[str] = []
        monkeypatch.setattr("lit_stable.callbacks.alarm.rank_zero_warn", said.append)
        fit(alarm, "spike", "spike")
        assert len(said) == 1
        assert "was not delivered" in said[0]
        assert "s3cret" not in said[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "takes one of the two"),
        ({"command": "true", "webhook": "https://x"}, "takes one of the two"),
        ({"command": " "}, "is empty"),
        ({"webhook": "ftp://x"}, "must begin with https"),
        ({"command": "true", "every_seconds": -1.0}, "must be 0 or more"),
    ],
)
def test_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        Alarm(**options)


def test_refuses_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALARM_TOKEN", raising=False)
    with pytest.raises(MisconfigurationException, match="set ALARM_TOKEN"):
        fit(Alarm(webhook="https://hooks.example/${ALARM_TOKEN}"), "spike")
