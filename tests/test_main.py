import os
import subprocess
import sys
from types import ModuleType

import pytest

import lit_stable
from lit_stable.__main__ import SUBCOMMANDS, main


def test_help_lists_every_subcommand_and_exit_code(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in SUBCOMMANDS)
    assert all(f"\n  {code:<4} " in text for code in (0, 1, 2, 4, 130, 141, 143))


def test_no_arguments_show_the_help_and_count_as_a_usage_error(capsys):
    assert main([]) == 2
    assert "usage: lit-stable SUBCOMMAND" in capsys.readouterr().out


def test_version_prints_the_block_for_a_bug_report(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lit-stable ")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("fitt", "lit-stable: fitt: is no subcommand; did you mean fit?\n"),
        (
            "xyz",
            "lit-stable: xyz: is no subcommand; write one of fit, validate, test, prepare, diagnose, inspect,"
            " dump-batch, replay, ctl, recipes, runs, export, import, caption, generate, average, check,"
            " check-devices.\n",
        ),
        ("--config", "lit-stable: --config: options come after the subcommand; start with one of fit, validate"),
    ],
)
def test_an_unknown_subcommand_is_refused_with_one_sentence(capsys, word, sentence):
    assert main([word]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_a_subcommand_goes_to_the_command_line_interface_and_its_code_is_returned(monkeypatch):
    seen = []
    module = ModuleType("lit_stable.cli.main")
    module.run = lambda argv: seen.append(argv) or 143
    monkeypatch.setitem(sys.modules, "lit_stable.cli.main", module)
    assert main(["fit", "--config", "quickstart"]) == 143
    assert seen == [["fit", "--config", "quickstart"]]


def heavy_modules_after(code):
    code += "; import sys; print(sorted({'torch', 'lightning', 'yaml', 'jsonargparse'} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[
        -1
    ]


def test_neither_the_package_nor_its_help_imports_torch():
    assert heavy_modules_after("import lit_stable") == "[]"
    assert heavy_modules_after("from lit_stable.__main__ import main; main(['--help'])") == "[]"


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "lit_stable", "fitt"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "lit-stable: fitt: is no subcommand; did you mean fit?\n"


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["buffered to the end", "written at once"])
def test_a_reader_that_has_gone_is_no_error_of_ours(size):
    """As with ``| head``: the stand-in prints what a page of ``check`` would be."""
    code = (
        "import sys, types; module = sys.modules['lit_stable.cli.main'] = types.ModuleType('main');"
        f" module.run = lambda argv: print('x' * {size}) or 0;"
        " from lit_stable.__main__ import main; sys.exit(main(['check']))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_public_names_are_these():
    assert lit_stable.__all__ == ["GPTConfig", "GPTModule", "LRSchedule", "TokenDataModule", "__version__"]
    assert set(lit_stable.__all__) <= set(dir(lit_stable))


def test_a_public_name_is_the_object_of_its_module():
    from lit_stable.optim.schedule import LRSchedule

    assert lit_stable.LRSchedule is LRSchedule
