"""The tree of runs: BloombergGPT's v2.x as the example."""

from __future__ import annotations

from lit_stable.cli.main import run
from lit_stable.run.branch import write_parent
from lit_stable.run.folder import checkpoint_path, new_folder
from lit_stable.run.tree import draw, find_runs


def begin(root, name, steps, parent=None, step=0, differences=()):
    folder = new_folder(root, name)
    (folder / "recipe-01.yaml").write_text("")
    for saved in steps:
        checkpoint_path(folder, saved).parent.mkdir(exist_ok=True)
        checkpoint_path(folder, saved).touch()
    if parent is not None:
        write_parent(folder, checkpoint_path(parent, step), step, list(differences))
    return folder


def log(folder, number, rows):
    path = folder / f"csv-{number:02d}" / "metrics.csv"
    path.parent.mkdir()
    path.write_text("step,train/loss,val/loss\n" + "".join(f"{row}\n" for row in rows))


def test_the_family_of_bloomberggpt(tmp_path):
    v20 = begin(tmp_path, "v2.0", [115_500, 133_200])
    v21 = begin(tmp_path, "v2.1", [129_900], v20, 115_500, ["peak: 6e-05 -> 4e-05"])
    begin(tmp_path, "v2.2", [], v20, 115_500, ["dropout: 0.0 -> 0.1"])
    v23 = begin(tmp_path, "v2.3", [137_100], v21, 129_900, ["peak: 4e-05 -> 2e-05", "dropout: 0.0 -> 0.1"])
    begin(tmp_path, "v2.5", [139_200], v23, 137_100, ["peak: 2e-05 -> 1e-05"])
    log(v20, 1, ["115500.0,2.2,", "115500,,2.116"])
    log(v20, 2, ["133200.0,2.1,"])
    assert draw(tmp_path).splitlines() == [
        "v2.0/0001  step 133200, loss 2.1000, checkpoints 115500, 133200",
        "├── v2.1/0001  from step 115500, no step logged, checkpoints 129900",
        "│   │   peak: 6e-05 -> 4e-05",
        "│   └── v2.3/0001  from step 129900, no step logged, checkpoints 137100",
        "│       │   peak: 4e-05 -> 2e-05",
        "│       │   dropout: 0.0 -> 0.1",
        "│       └── v2.5/0001  from step 137100, no step logged, checkpoints 139200",
        "│               peak: 2e-05 -> 1e-05",
        "└── v2.2/0001  from step 115500, no step logged, no checkpoint",
        "        dropout: 0.0 -> 0.1",
    ]


def test_a_parent_outside_the_folder_is_named(tmp_path):
    far = begin(tmp_path / "old", "far", [])
    begin(tmp_path / "new", "near", [], far, 5)
    (only,) = find_runs(tmp_path / "new")
    assert only.origin == far
    assert draw(tmp_path / "new") == "near/0001  from step 5 of ../../../old/far/0001, no step logged, no checkpoint"


def test_what_cannot_be_read_is_named_and_the_rest_is_drawn(tmp_path):
    old = begin(tmp_path, "a", [3])
    torn = begin(tmp_path, "b", [5], old, 3)
    (torn / "parent.yaml").write_text("")
    log(old, 1, ["2,2.5,"])
    log(old, 2, ["3,abc,"])
    assert draw(tmp_path).splitlines() == [
        "a/0001  step 2, loss 2.5000 (csv-02/metrics.csv cannot be read), checkpoints 3",
        "b/0001  no step logged, checkpoints 5",
        f"    {torn}/parent.yaml: cannot be read (it is empty); put it back as it was.",
    ]


def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path, capsys):
    assert draw(tmp_path) == f"{tmp_path}: no runs."
    assert run(["runs", str(tmp_path / "none")]) == 2
    assert "none: is no folder; give the one that holds the runs" in capsys.readouterr().err
