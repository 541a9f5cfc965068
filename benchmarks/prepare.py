"""Measure `prepare`: documents and megabytes per second by number of processes. Run it as a script; it is no test.

The input is the standard library's own source, each file a document, several times over, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from lit_stable.data.corpus import PythonStandardLibrary
from lit_stable.data.prepare import prepare
from lit_stable.data.text import inputs
from lit_stable.data.tokenizer import make_tokenizer


def write_corpus(folder: Path, copies: int) -> tuple[int, int]:
    """One file of JSON lines per copy; documents and bytes of text in all."""
    texts = [text for _, text in PythonStandardLibrary().files() if text.strip()]
    lines = "".join(json.dumps({"text": text, "score": len(text)}) + "\n" for text in texts)
    for number in range(copies):
        (folder / f"{number:03d}.jsonl").write_text(lines)
    return copies * len(texts), copies * sum(len(text.encode()) for text in texts)


def measure(source: Path, out: Path, size: tuple[int, int], tokenizer: str, workers: int, artefacts: str) -> None:
    """Time one preparation of the whole corpus, start of processes and assembly included."""
    start = time.perf_counter()
    prepare([source], out, tokenizer, workers=workers, artefacts=artefacts, keep="score", report=lambda line: None)
    seconds = time.perf_counter() - start
    print(
        f"{workers} workers, artefacts {artefacts}: {seconds:.1f} s, {size[0] / seconds:,.0f} documents/s, "
        f"{size[1] / 1e6 / seconds:.2f} MB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=4, help="of 12 MB each")
    parser.add_argument("--rounds", type=int, default=2, help="of all variants, one after the other")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        size = write_corpus(folder / "in", arguments.copies)
        tokenizer = folder / "tokenizer.json"
        make_tokenizer("bpe:16384", (text for _, text in PythonStandardLibrary().files())).save(tokenizer)
        print(f"{size[0]:,} documents, {size[1] / 1e6:.1f} MB, pieces of {inputs.PIECE_BYTES >> 20} MiB")
        variants = [(1, "report"), (2, "report"), (1, "off"), (2, "off")] * arguments.rounds
        for number, (workers, artefacts) in enumerate(variants):
            measure(folder / "in", folder / f"out-{number}", size, str(tokenizer), workers, artefacts)


if __name__ == "__main__":
    main()
