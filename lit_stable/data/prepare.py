"""Turn text into a folder of token stores: ``train``, ``validation`` and the tokenizer that made them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_stable.data.atomic_folder import new_folder
from lit_stable.data.documents import Document, TextFiles
from lit_stable.data.store_writer import TokenStoreWriter
from lit_stable.data.tokenizer import Tokenizer, check_tokenizer_spec, make_tokenizer

TOKENIZER_FILE = "tokenizer.json"
SUMMARY_FILE = "summary.json"
PROGRESS_SECONDS = 2.0
BATCH_CHARACTERS = 2_000_000  # what is encoded at once, over all cores: bounds memory


@dataclass(frozen=True)
class Summary:
    """What a prepared folder holds; kept in its ``summary.json``.

    ``sha256`` is over the texts in order, each preceded by its length; ``num_empty`` documents were left out.
    """

    tokenizer: str
    vocab_size: int
    num_documents: dict[str, int]
    num_tokens: dict[str, int]
    num_bytes: int
    num_empty: int
    sha256: str

    def __str__(self) -> str:
        parts = [
            f"{split} {count:,} tokens in {self.num_documents[split]:,}" for split, count in self.num_tokens.items()
        ]
        return (
            f"{self.num_bytes:,} bytes (sha256 {self.sha256[:12]}), tokenizer {self.tokenizer}, "
            f"vocabulary {self.vocab_size:,}: {', '.join(parts)} documents; {self.num_empty} empty ones left out"
        )


def prepare(
    inputs: Sequence[str | Path],
    out: Path | str,
    tokenizer: str,
    validation_fraction: float = 0.01,
    separator: str | None = None,
    report: Callable[[str], None] = print,
) -> Summary:
    """Tokenise text and JSONL files into the new folder ``out``.

    Args:
        inputs: Paths and glob patterns, see ``TextFiles``.
        out: Folder to create; it appears only when everything in it is complete.
        tokenizer: ``bytes``, ``bpe:SIZE`` (trained on these inputs) or the path of a tokenizer JSON.
        validation_fraction: Share of documents, chosen by a hash of their text, in [0, 1); 0: no validation split.
        separator: Text between the documents of a text file; None: a file is a document.
        report: Receives one progress line every two seconds and the summary.

    Raises:
        ValueError: when an argument is unusable, a file or line is bad, or a split would be empty.
        FileExistsError: when another process wrote ``out`` in the meantime.
    """
    out = Path(out)
    problems = [problem] if (problem := check_tokenizer_spec(tokenizer)) else []
    if not 0 <= validation_fraction < 1:
        problems.append(f"validation_fraction={validation_fraction}: must be at least 0 and below 1.")
    if separator == "":
        problems.append("separator='': must not be empty; leave it out to make each file a document.")
    if out.exists():
        problems.append(f"out={out}: exists already; choose another folder or delete it.")
    if problems:
        raise ValueError("\n".join(problems))
    documents = TextFiles(inputs, source=out.name, separator=separator)
    return prepare_documents(documents, out, tokenizer, validation_fraction, report)


def prepare_documents(
    documents: Iterable[Document],
    out: Path,
    tokenizer: str,
    validation_fraction: float,
    report: Callable[[str], None] = print,
) -> Summary:
    """Tokenise ``documents`` into the new folder ``out``; they are iterated twice when a tokenizer is trained.

    Raises:
        ValueError: when there is no document or a split would be empty.
        FileExistsError: when ``out`` exists.
    """
    with new_folder(out) as folder:
        if tokenizer.startswith("bpe:"):
            report(f"{out.name}: training the tokenizer {tokenizer}")
        encoder = make_tokenizer(tokenizer, (document.text for document in documents))
        corpus = _Corpus(documents, out.name, report)
        writers = _write(corpus, folder, encoder, validation_fraction)
        summary = Summary(
            tokenizer=tokenizer,
            vocab_size=encoder.vocab_size,
            num_documents={split: writer.num_documents for split, writer in writers.items()},
            num_tokens={split: writer.num_tokens for split, writer in writers.items()},
            num_bytes=corpus.num_bytes,
            num_empty=corpus.num_empty,
            sha256=corpus.sha256.hexdigest(),
        )
        (folder / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    report(f"{out}: {summary}")
    return summary


def _write(
    corpus: _Corpus, folder: Path, encoder: Tokenizer, validation_fraction: float
) -> dict[str, TokenStoreWriter]:
    """Write the tokenizer and the stores into ``folder``; returns the closed writers by split."""
    tokenizer_sha256 = encoder.save(folder / TOKENIZER_FILE)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                TokenStoreWriter(
                    folder / split,
                    vocab_size=encoder.vocab_size,
                    eot_id=encoder.eot_id,
                    tokenizer=f"../{TOKENIZER_FILE}",
                    tokenizer_sha256=tokenizer_sha256,
                    split=split,
                )
            )
            for split in (["train", "validation"] if validation_fraction else ["train"])
        }
        for batch in corpus.batches():
            for document, ids in zip(batch, encoder.encode_batch([d.text for d in batch]), strict=True):
                writers[split_of(document.text, validation_fraction)].add(ids, document.source, document.date)
            corpus.report_progress(sum(writer.num_tokens for writer in writers.values()))
        _require_documents(writers, validation_fraction)
    return writers


def split_of(text: str, validation_fraction: float) -> str:
    """``train`` or ``validation``, by a hash of the text alone: equal texts never end up on both sides."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < validation_fraction * 2**64 else "train"


class _Corpus:
    """The documents in batches, measured and hashed on their way."""

    def __init__(self, documents: Iterable[Document], name: str, report: Callable[[str], None]) -> None:
        self.num_documents = self.num_empty = self.num_bytes = 0
        self.sha256 = hashlib.sha256()
        self._documents, self._name, self._report = documents, name, report
        self._start = self._reported = time.monotonic()

    def batches(self) -> Iterator[list[Document]]:
        batch: list[Document] = []
        characters = 0
        for document in self._documents:
            if not document.text.strip():
                self.num_empty += 1
                continue
            content = document.text.encode("utf-8")
            self.sha256.update(len(content).to_bytes(8, "big") + content)
            self.num_bytes += len(content)
            self.num_documents += 1
            batch.append(document)
            characters += len(document.text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def report_progress(self, num_tokens: int) -> None:
        now = time.monotonic()
        if now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            speed = self.num_bytes / 1e6 / (now - self._start)
            self._report(
                f"{self._name}: {self.num_documents:,} documents, {self.num_bytes / 1e6:.1f} MB, "
                f"{num_tokens:,} tokens, {speed:.1f} MB/s"
            )


def _require_documents(writers: dict[str, TokenStoreWriter], validation_fraction: float) -> None:
    total = sum(writer.num_documents for writer in writers.values())
    if total == 0:
        raise ValueError("input: has no text in it, so there is nothing to write; check the paths.")
    empty = [split for split, writer in writers.items() if writer.num_documents == 0]
    if empty:
        raise ValueError(
            f"validation_fraction={validation_fraction}: leaves the {empty[0]} split of {total} documents empty; give "
            "more documents, a separator that cuts text files into documents, or another fraction (0: no validation)."
        )
