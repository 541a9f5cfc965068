from __future__ import annotations

import io

from lit_stable.data.text.progress_line import ProgressLine
from lit_stable.data.text.tokenising import Advance


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(terminal, seconds, total=1000, done=200):
    """Lines reported while an input of 1000 bytes, of which 200 were done before, goes on by 100 bytes at a time."""
    now = [0.0]
    lines: list[str] = []
    with ProgressLine("out", total, done, lines.append, terminal, clock=lambda: now[0]) as line:
        for _ in range(4):
            now[0] += seconds
            line.advance(Advance(100, 2_000_000, 50, 1000))
    return lines


def test_a_log_gets_a_line_now_and_then_with_speed_and_time_left():
    assert run(io.StringIO(), seconds=20.0) == [
        "out: 40%, 100 documents, 4.0 MB, 2,000 tokens; 2 documents/s, 0.1 MB/s, 0:02:00 left",
        "out: 60%, 200 documents, 8.0 MB, 4,000 tokens; 2 documents/s, 0.1 MB/s, 0:01:20 left",
    ]
    assert run(io.StringIO(), seconds=1.0) == []


def test_a_terminal_gets_one_line_that_rewrites_itself_and_goes():
    terminal = Terminal()
    assert run(terminal, seconds=1.0) == []
    written = terminal.getvalue()
    assert "\n" not in written
    assert written.startswith(
        "\rout: 30%, 50 documents, 2.0 MB, 1,000 tokens; 50 documents/s, 2.0 MB/s, 0:00:07 left\x1b[K\r"
    )
    assert written.endswith("0:00:04 left\x1b[K\r\x1b[K")


def test_without_a_known_size_there_is_no_share():
    assert run(io.StringIO(), seconds=40.0, total=0, done=0)[0].startswith("out: 50 documents, 2.0 MB")
