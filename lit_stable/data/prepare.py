"""Turn text into a folder of token stores: ``train``, ``validation`` and the tokenizer that made them.

The work is cut into pieces, each of which becomes one or more *parts*, files that are complete or absent. They lie in
``OUT.unfinished`` until the stores are assembled from them, in the order of the input. So the result depends neither on
the number of processes nor on how often one was killed on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from lit_stable.callbacks.not_written import writing
from lit_stable.callbacks.whole_file import file_in_the_way
from lit_stable.data.atomic_folder import new_folder
from lit_stable.data.conditions import DocumentFilter
from lit_stable.data.text.artefacts import ArtefactLimits
from lit_stable.data.text.assembly import Assembly, Choice
from lit_stable.data.text.documents import Document, Fields, Place, parse_date
from lit_stable.data.text.inputs import plan_pieces
from lit_stable.data.text.parts import finished_parts
from lit_stable.data.text.preparation import COMPLETE_FILE, TOKENIZER_FILE, Preparation, Report, assemble
from lit_stable.data.text.prepare_arguments import kept_keys, prepare_problems
from lit_stable.data.text.progress_line import ProgressLine
from lit_stable.data.text.readers import START, Row, Step
from lit_stable.data.text.summary import SUMMARY_FILE, Summary, read_summary
from lit_stable.data.text.tokenising import PieceWorker, Tokenising
from lit_stable.data.text.unfinished_folder import locked_folder, remove_folder, unfinished_folder
from lit_stable.data.tokenizer import is_trained, make_tokenizer

__all__ = ["SUMMARY_FILE", "TOKENIZER_FILE", "Summary", "prepare", "prepare_documents"]

DEFAULT_FRACTION = 0.01
DEFAULT_LIMITS = ArtefactLimits()


def prepare(
    inputs: Sequence[str | Path],
    out: Path | str,
    tokenizer: str,
    validation_fraction: float | None = None,
    separator: str | None = None,
    *,
    validation_from: str | None = None,
    keep: str = "",
    filter: str | None = None,
    order: Literal["input", "date"] = "input",
    artefacts: Literal["off", "report", "reject"] = "report",
    limits: ArtefactLimits = DEFAULT_LIMITS,
    strict: bool = False,
    workers: int = 1,
    text_key: str = "text",
    date_key: str = "date",
    report: Report = print,
) -> Summary:
    """Tokenise files and data sets into the new folder ``out``; when it was interrupted, go on where it was.

    Args:
        inputs: Files, folders, patterns (``**`` descends) and ``hf:NAME[:CONFIG][@SPLIT]``. JSON lines (.jsonl,
            .ndjson, .json), Parquet and data sets hold ``text`` and optionally ``source`` and ``date``; any other file
            is UTF-8 text. Lines and text may be compressed, .gz or .zst.
        out: Folder to create; it appears only when everything in it is complete.
        tokenizer: ``bytes``, ``bpe:SIZE`` or ``unigram:SIZE`` (trained on these inputs), with ``:phrases`` or a regular
            expression behind it if texts shall not be cut as GPT-2 does, or the path of a tokenizer JSON.
        validation_fraction: Share of documents, chosen by a hash of their text, in [0, 1); 0: no validation split; 0.01
            if nothing is said.
        separator: Text between the documents of a text file; None: a file is a document.
        validation_from: Date from which on documents go to validation, in place of a fraction.
        keep: Keys whose values are kept per document, as ``score,language``; date and source always are.
        filter: Which documents are written, as ``score >= 0.5``, ``top 0.3 by score``, joined by ``and``; its keys are
            kept.
        order: ``date`` writes documents oldest first; their table is then held in memory, about 60 bytes each.
        artefacts: Whether documents that look like the work of a broken pipeline are told, or left out.
        limits: From where on a document is such an artefact.
        strict: Stop at the first document that cannot be read, in place of leaving it out.
        workers: Processes that tokenise; the result does not depend on it.
        text_key: Key of the text.
        date_key: Key of the date.
        report: Receives progress where there is no terminal, and the summary.

    Raises:
        ValueError: when an argument is unusable, an input cannot be read or matches nothing, or a split would be empty.
        FileExistsError: when another process wrote ``out`` in the meantime.
        OSError: when it cannot be written; it names ``out``.
    """
    out = Path(out)
    if not out.name:
        raise ValueError(f"out={out}: exists already; name a folder that is to be made in it.")
    work = unfinished_folder(out)
    problems = prepare_problems(
        out, tokenizer, validation_fraction, validation_from, separator, keep, filter, limits, workers
    )
    if out.exists() and not work.exists():
        problems.append(f"out={out}: exists already; choose another folder or delete it.")
    if (file := file_in_the_way(out)) is not None:
        problems.append(f"out={out}: cannot be written, since {file} is a file; choose another folder.")
    if problems:
        raise ValueError("\n".join(problems))
    condition = None if filter is None else DocumentFilter(filter)
    fields = Fields(out.name, separator, text_key, date_key, kept_keys(keep, condition))
    fraction = DEFAULT_FRACTION if validation_fraction is None and validation_from is None else validation_fraction
    choice = Choice(fraction or 0.0, parse_date(validation_from), condition, artefacts == "reject", order == "date")
    pieces = plan_pieces(inputs, fields, own=work)
    with writing(out), locked_folder(work, lambda: report(f"{out}: another process is at it; waiting")):
        if out.exists():
            return _finished_before(out, work)
        preparation = Preparation(work, tokenizer, pieces, fields, report)
        try:
            summary = preparation.run(out, choice, None if artefacts == "off" else limits, strict, workers)
        except BaseException:  # Ctrl-C too
            preparation.leave()
            raise
        remove_folder(work)
    return summary


def _finished_before(out: Path, work: Path) -> Summary:
    """``out`` appeared: an earlier process was killed between its last two acts, or another one was faster."""
    killed = (work / COMPLETE_FILE).exists()
    remove_folder(work)
    if not killed:
        raise FileExistsError(f"{out}: another process wrote it first.")
    return read_summary(out)


def prepare_documents(
    documents: Iterable[Document], out: Path, tokenizer: str, validation_fraction: float, report: Report = print
) -> Summary:
    """Tokenise ``documents``, few enough to do it again when interrupted, into the new folder ``out``.

    They are iterated twice when a tokenizer is trained.

    Raises:
        ValueError: when there is no document or a split would be empty.
        FileExistsError: when ``out`` exists.
    """
    with new_folder(out) as folder:
        if is_trained(tokenizer):
            report(f"{out.name}: training the tokenizer {tokenizer}")
        encoder = make_tokenizer(tokenizer, (document.text for document in documents))
        sha256 = encoder.save(folder / TOKENIZER_FILE)
        parts = folder / "parts"
        parts.mkdir()
        how = Tokenising(parts, folder / TOKENIZER_FILE, sha256, Fields(out.name), limits=None)
        steps = (Step(Row(Place(out.name), document, ""), START, 0) for document in documents)
        with ProgressLine(out.name, 0, 0, report) as line:
            PieceWorker(how).write_parts("documents", 0, steps, line.advance)
        assembly = Assembly(finished_parts(parts, "documents"), (), Choice(validation_fraction))
        summary = assemble(assembly, folder, tokenizer, encoder, sha256, report)
        remove_folder(parts)
    report(f"{out}: {summary}")
    return summary
