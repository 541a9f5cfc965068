"""What `prepare` says in the end, and what of it stays in the folder."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from lit_stable.data.store_writer import TokenStoreWriter
from lit_stable.data.text.assembly import Assembly
from lit_stable.data.text.parts import Artefact
from lit_stable.data.text.readers import describe

SUMMARY_FILE, ARTEFACTS_FILE = "summary.json", "artefacts.jsonl"
SHOWN = 5  # of what is bad or suspicious, on the screen
MOST_LISTED = 100_000  # artefacts in the file


@dataclass(frozen=True)
class SourceSummary:
    """Documents of one source that were found, written, and flagged as artefacts."""

    documents: int
    kept: int
    artefacts: int


@dataclass(frozen=True)
class Summary:
    """What a prepared folder holds; kept in its ``summary.json``.

    ``sha256`` is over the first 16 bytes of the SHA-256 of every text in order, dropped ones included. Of the documents
    that were found, ``num_empty`` hold blanks only, ``num_bad`` could not be read, and both were left out.
    """

    tokenizer: str
    vocab_size: int
    num_documents: dict[str, int]
    num_tokens: dict[str, int]
    num_bytes: int
    num_empty: int
    num_bad: int
    sha256: str
    sources: dict[str, SourceSummary] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [
            f"{split} {count:,} tokens in {self.num_documents[split]:,}" for split, count in self.num_tokens.items()
        ]
        return (
            f"{self.num_bytes:,} bytes (sha256 {self.sha256[:12]}), tokenizer {self.tokenizer}, "
            f"vocabulary {self.vocab_size:,}: {', '.join(parts)} documents; {self.num_empty} empty ones left out"
        )


class Listed(NamedTuple):
    """An artefact with its place and source spelt out."""

    where: str
    source: str
    artefact: Artefact


class Findings:
    """What the parts of an assembly say of the documents in them, read once."""

    def __init__(self, assembly: Assembly) -> None:
        self.num_bytes = self.num_empty = self.num_bad = 0
        self.bad: list[str] = []
        self.artefacts: list[Listed] = []
        self.by_source: Counter[str] = Counter()
        sha256 = hashlib.sha256()
        lines_before: Counter[str] = Counter()  # of each file, up to the piece at hand
        for part in assembly.parts():
            summary = part.summary
            sha256.update(part.digests.tobytes())
            self.num_bytes += summary.num_bytes
            self.num_empty += summary.num_empty
            self.num_bad += summary.num_bad
            before = lines_before[summary.file]
            self.bad += [f"{describe(r.place, before)}: {r.problem}" for r in summary.bad[: SHOWN - len(self.bad)]]
            sources = [str(part.sources.value(artefact.row)) for artefact in summary.artefacts]
            self.by_source.update(sources)
            listed = zip(summary.artefacts[: MOST_LISTED - len(self.artefacts)], sources, strict=False)
            self.artefacts += [Listed(describe(a.place, before), source, a) for a, source in listed]
            lines_before[summary.file] += summary.cursor[2] if summary.last else 0
        self.sha256 = sha256.hexdigest()

    def lines(self, assembly: Assembly) -> list[str]:
        """What is said beside the summary: of what could not be read, was dropped, or looks wrong."""
        lines: list[str] = []
        if self.num_bad:
            lines.append(f"{self.num_bad:,} could not be read and {'was' if self.num_bad == 1 else 'were'} left out:")
            lines += [f"  {line}" for line in self.bad]
            lines += ["  ..."] if self.num_bad > len(self.bad) else []
        counts = assembly.counts
        if assembly.choice.condition is not None:
            lines.append(f"filter {assembly.choice.condition.text}:")
            lines += [
                f"  {name}: {counts.kept[name] + counts.artefacts[name]:,} of {total:,} documents kept"
                for name, total in counts.total.items()
            ]
        if assembly.choice.sort_by_date and counts.num_undated:
            lines.append(f"{counts.num_undated:,} documents have no date and stand before all others")
        elif assembly.choice.validation_from and counts.num_undated:
            lines.append(f"{counts.num_undated:,} documents have no date and went to train")
        return lines + self._artefact_lines(assembly)

    def _artefact_lines(self, assembly: Assembly) -> list[str]:
        if not self.artefacts:
            return []
        did = "rejected" if assembly.choice.reject else "kept; --artefacts reject leaves them out"
        lines = [f"documents that look like artefacts ({did}; listed in {ARTEFACTS_FILE}):"]
        totals = assembly.counts.total
        for name, count in self.by_source.items():
            lines.append(f"  {name}: {count:,} of {totals[name]:,} ({count / totals[name]:.2%})")
        for where, _, artefact in self.artefacts[:SHOWN]:
            measured = ", ".join(f"{name} {value:.2f}" for name, value in artefact.measures._asdict().items())
            lines.append(f"  {where}: {measured}: {artefact.begins!r}")
        return lines


def summarise(
    assembly: Assembly, findings: Findings, writers: Mapping[str, TokenStoreWriter], tokenizer: str, vocab_size: int
) -> Summary:
    """The summary of what was written."""
    counts = assembly.counts
    return Summary(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        num_documents={split: writer.num_documents for split, writer in writers.items()},
        num_tokens={split: writer.num_tokens for split, writer in writers.items()},
        num_bytes=findings.num_bytes,
        num_empty=findings.num_empty,
        num_bad=findings.num_bad,
        sha256=findings.sha256,
        sources={
            name: SourceSummary(total, counts.kept[name], findings.by_source[name])
            for name, total in counts.total.items()
        },
    )


def write_findings(folder: Path, summary: Summary, findings: Findings) -> None:
    """Leave the summary and the list of artefacts in the prepared folder."""
    (folder / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    if findings.artefacts:
        with (folder / ARTEFACTS_FILE).open("w", encoding="utf-8") as file:
            for where, source, artefact in findings.artefacts:
                record = {
                    "place": where,
                    "source": source,
                    **{name: round(value, 4) for name, value in artefact.measures._asdict().items()},
                    "begins": artefact.begins,
                }
                file.write(json.dumps(record) + "\n")


def read_summary(folder: Path) -> Summary:
    """The summary of a prepared folder."""
    record = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    sources = {name: SourceSummary(**counts) for name, counts in record.pop("sources").items()}
    return Summary(**record, sources=sources)
