from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_stable.diagnosis.scalars import read_scalars


def test_reads_csv_of_another_trainer_and_recognises_names(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("iteration,lm loss,Grad-Norm,lr,note\n10,3.5,1.25,1e-4,x\n20,3.25,,1e-4,\n30,nan,2,1e-4,y\n")
    scalars = read_scalars(path)
    assert scalars.called == {"loss": "lm loss", "grad_norm": "Grad-Norm", "lr": "lr"}
    assert [step for step, _ in scalars.rows] == [10, 20, 30]
    assert scalars.rows[0][1] == {"loss": 3.5, "grad_norm": 1.25, "lr": 1e-4}
    assert "grad_norm" not in scalars.rows[1][1]
    assert scalars.every == 10


def test_rows_without_a_step_are_counted(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("loss\n3\n2\n")
    assert [step for step, _ in read_scalars(tmp_path).rows] == [1, 2]


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
def test_reads_what_lightning_writes(tmp_path: Path, logger: type) -> None:
    log = logger(tmp_path)
    for step in (1, 2, 3):
        log.log_metrics({"train/loss": 3.0 / step, "val/loss": 4.0 / step}, step)
    log.save()
    log.finalize("success")
    scalars = read_scalars(tmp_path)
    assert [(step, round(values["loss"], 3)) for step, values in scalars.rows] == [(1, 3.0), (2, 1.5), (3, 1.0)]
    assert scalars.rows[2][1]["val_loss"] == pytest.approx(4 / 3)


def test_a_resumed_run_goes_on_where_its_later_file_begins(tmp_path: Path) -> None:
    for name, rows in {"a": "1,5\n2,4\n3,9\n4,9\n", "b": "3,3\n4,2\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,train/loss\n" + rows)
    assert [values["loss"] for _, values in read_scalars(tmp_path).rows] == [5.0, 4.0, 3.0, 2.0]


def test_names_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,criterion\n1,3\n")
    with pytest.raises(ValueError, match=r"no training loss among criterion; give it, as in --names.loss"):
        read_scalars(tmp_path)
    assert read_scalars(tmp_path, {"loss": "criterion"}).rows == [(1, {"loss": 3.0})]
    with pytest.raises(ValueError, match=r"names loss=x: .* holds no such scalar; it holds criterion"):
        read_scalars(tmp_path, {"loss": "x"})


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-8", "utf-8-sig"])
def test_text_in_other_encodings_is_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "log.csv").write_bytes("step,loss,größe\n1,3,x\n2,2.5,ü\n".encode(encoding))
    assert read_scalars(tmp_path).rows == [(1, {"loss": 3.0}), (2, {"loss": 2.5})]


def test_a_note_of_any_length_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"step,loss,note\n1,3,{'x' * 200_000}\n")
    assert read_scalars(tmp_path).rows == [(1, {"loss": 3.0})]


@pytest.mark.parametrize("content", [b"\0\xff\xfe\x80step", b"PK\3\4\0\0\10\10\0\0archive/data.pkl"])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.ckpt: is no text but binary data; give a CSV file, a TensorBoard event"):
        read_scalars(tmp_path / "a.ckpt")


def test_what_is_no_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match=r"folder\.csv: cannot be read as CSV \(Is a directory\); give the log that"):
        read_scalars(tmp_path)


def test_says_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_scalars(tmp_path / "no")
    with pytest.raises(ValueError, match="holds no scalars"):
        read_scalars(tmp_path)
