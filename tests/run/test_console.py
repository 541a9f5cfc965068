from __future__ import annotations

import logging
import warnings

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lit_stable.callbacks import events
from lit_stable.run.console import human_bytes, human_count, quiet_lightning, say


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (7.25, "7.25"), (999, "999"), (1000, "1k"), (2_340_000, "2.34M"), (1.3e9, "1.3B"), (26e12, "26T")],
)
def test_counts_have_three_digits_and_a_suffix(count, text):
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**29, "1.5 GiB"), (2**20, "1 MiB"), (2**41, "2 TiB")],
)
def test_bytes_have_binary_suffixes(size, text):
    assert human_bytes(size) == text


def test_only_rank_zero_speaks(capsys, monkeypatch):
    say("heard")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    say("not heard")
    assert capsys.readouterr().out == "heard\n"


@pytest.fixture
def lightnings_log():
    logger = logging.getLogger("lightning.pytorch")
    handlers = [logger, *logger.handlers]
    filters = [list(owner.filters) for owner in handlers]
    yield logger
    for owner, before in zip(handlers, filters, strict=True):
        owner.filters[:] = before


def record(path: str, level: int) -> logging.LogRecord:
    return logging.LogRecord("lightning.pytorch", level, path, 1, "text", None, None)


def test_of_lightnings_log_warnings_and_our_own_lines_pass(lightnings_log):
    quiet_lightning()
    import lit_stable.module
    from lit_stable.callbacks import grad_clip

    for path in (lit_stable.module.__file__, grad_clip.__file__):
        assert lightnings_log.filter(record(path, logging.INFO))
    elsewhere = "/site-packages/lightning/pytorch/trainer/trainer.py"
    assert not lightnings_log.filter(record(elsewhere, logging.INFO))
    assert lightnings_log.filter(record(elsewhere, logging.WARNING))


def test_gathering_over_a_mesh_is_not_remarked_upon(lightnings_log):
    from torch.distributed.tensor import _redistribute

    quiet_lightning()
    assert not _redistribute.logger.isEnabledFor(logging.WARNING)
    assert _redistribute.logger.isEnabledFor(logging.ERROR)


def test_only_the_listed_warnings_are_silenced(lightnings_log):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_lightning()
        warnings.warn("The 'train_dataloader' does not have many workers which may be slow", stacklevel=1)
        warnings.warn("Something else", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["Something else"]


def test_a_warning_of_ours_is_a_sentence_and_others_say_where_they_come_from(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", lambda *told: f"{told[2]}: {told[0]}\n")
    quiet_lightning()
    quiet_lightning()
    assert warnings.formatwarning("step 20: control", UserWarning, events.__file__, 101) == "step 20: control\n"
    assert warnings.formatwarning("old", UserWarning, "/elsewhere/x.py", 7) == "/elsewhere/x.py: old\n"
