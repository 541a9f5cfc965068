"""The way from pieces of text to stores, through a folder of parts that outlives a kill."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lit_stable.data.text.artefacts import ArtefactLimits
from lit_stable.data.text.assembly import Assembly, Choice
from lit_stable.data.text.documents import Fields
from lit_stable.data.text.inputs import Piece
from lit_stable.data.text.parts import finished_parts, is_finished, remove_others, remove_scratch
from lit_stable.data.text.processes import run_jobs
from lit_stable.data.text.progress_line import ProgressLine
from lit_stable.data.text.readers import read_piece
from lit_stable.data.text.summary import Findings, Summary, summarise, write_findings
from lit_stable.data.text.tokenising import PieceWorker, Tokenising
from lit_stable.data.text.unfinished_folder import remove_folder
from lit_stable.data.tokenizer import Tokenizer, is_trained, load_tokenizer, make_tokenizer

TOKENIZER_FILE = "tokenizer.json"
COMPLETE_FILE = "complete"  # the result was about to take its name
RESULT = "result"

Report = Callable[[str], None]


class Preparation:
    """What is under way in a work folder.

    Args:
        work: The folder, locked.
        tokenizer: Its spec.
        pieces: The input.
        fields: What is read of a record.
        report: Receives lines.
    """

    def __init__(self, work: Path, tokenizer: str, pieces: Sequence[Piece], fields: Fields, report: Report) -> None:
        self._work, self._parts = work, work / "parts"
        self._spec, self._pieces, self._fields, self._report = tokenizer, pieces, fields, report
        self._parts.mkdir(exist_ok=True)
        (work / COMPLETE_FILE).unlink(missing_ok=True)
        remove_scratch(self._parts)

    def run(self, out: Path, choice: Choice, limits: ArtefactLimits | None, strict: bool, workers: int) -> Summary:
        """Do what is not done yet; in the end all of it stands under the name ``out``.

        Args:
            out: The prepared folder.
            choice: What is written of the documents.
            limits: From where on a document is an artefact; None: none is.
            strict: Whether a document that cannot be read ends it all.
            workers: Number of processes.
        """
        encoder, sha256 = self._tokenizer(out.name)
        how = Tokenising(self._parts, self._work / TOKENIZER_FILE, sha256, self._fields, limits, strict)
        self._tokenise(out.name, how, workers)
        tables = list(chain.from_iterable(finished_parts(self._parts, how.key(piece)) for piece in self._pieces))
        result = self._work / RESULT
        remove_folder(result)
        result.mkdir()
        shutil.copyfile(how.tokenizer, result / TOKENIZER_FILE)
        assembly = Assembly(tables, self._fields.keep, choice)
        summary = assemble(assembly, result, self._spec, encoder, sha256, self._report)
        (self._work / COMPLETE_FILE).touch()
        result.rename(out)
        self._report(f"{out}: {summary}")
        return summary

    def leave(self) -> None:
        """Something stopped the work, perhaps a full disk: keep what took time, and nothing else."""
        remove_scratch(self._parts)
        remove_folder(self._work / RESULT)
        if any(path.stat().st_size for path in self._parts.glob("*.tokens")):
            self._report(f"what is finished is kept in {self._work} and used when the command is run again")
        else:
            remove_folder(self._work)

    def _tokenizer(self, name: str) -> tuple[Tokenizer, str]:
        """The tokenizer, trained once for the same texts, in the work folder; and the SHA-256 of its file."""
        path = self._work / TOKENIZER_FILE
        made_of = hashlib.sha256(repr((self._spec, self._pieces, self._fields)).encode()).hexdigest()
        trained = self._work / f"trained-{made_of}"
        if is_trained(self._spec) and path.exists() and trained.exists():
            return load_tokenizer(path), hashlib.sha256(path.read_bytes()).hexdigest()
        for old in self._work.glob("trained-*"):
            old.unlink()
        if is_trained(self._spec):
            self._report(f"{name}: training the tokenizer {self._spec}")
        encoder = make_tokenizer(self._spec, self._texts())
        sha256 = encoder.save(path)
        trained.touch()
        return encoder, sha256

    def _texts(self) -> Iterator[str]:
        for piece in self._pieces:
            for step in read_piece(piece, self._fields):
                if step.row.document is not None:
                    yield step.row.document.text

    def _tokenise(self, name: str, how: Tokenising, workers: int) -> None:
        keys = [how.key(piece) for piece in self._pieces]
        remove_others(self._parts, keys)
        left = [piece for piece, key in zip(self._pieces, keys, strict=True) if not is_finished(self._parts, key)]
        done = len(self._pieces) - len(left)
        if done:
            self._report(f"{name}: going on; {done} of {len(self._pieces)} pieces are done")
        total, size_left = (sum(piece.size for piece in pieces) for pieces in (self._pieces, left))
        with ProgressLine(name, total, total - size_left, self._report) as line:
            run_jobs(PieceWorker(how), left, workers, line.advance)


def assemble(assembly: Assembly, folder: Path, spec: str, encoder: Tokenizer, sha256: str, report: Report) -> Summary:
    """Write the stores and what was found into ``folder``, in which the tokenizer lies already."""
    fields: dict[str, Any] = {"vocab_size": encoder.vocab_size, "eot_id": encoder.eot_id, "tokenizer_sha256": sha256}
    writers = assembly.write(folder, tokenizer=f"../{TOKENIZER_FILE}", **fields)
    findings = Findings(assembly)
    summary = summarise(assembly, findings, writers, spec, encoder.vocab_size)
    write_findings(folder, summary, findings)
    for line in findings.lines(assembly):
        report(line)
    return summary
