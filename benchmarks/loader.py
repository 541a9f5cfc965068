"""Measure the data path: opening, resuming and reading, and the memory it takes. Run it as a script; it is no test.

The store is a sparse file of zeros with valid checksums, so 10^9 tokens take no disk space and every byte that is read
is checked and copied like any other. The mask of repetitions is measured on a small store of tokens drawn like words,
in which it finds nothing, as in ordinary text, and on the zeros, in which it masks everything.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from lit_stable.data.columns import Column
from lit_stable.data.epochs import SampleOrder
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.mixture import SHUFFLED, Mixture
from lit_stable.data.store import CHECKSUM, CHUNK_BYTES, DOCUMENT, FORMAT, TokenStore
from lit_stable.data.store_writer import TokenStoreWriter
from lit_stable.data.stream import TokenStream

SHARD_BYTES = 1 << 30
DOCUMENT_TOKENS = 1000
QUICKSTART_TOKENS = 3_773_180


def write_sparse_store(folder: Path, num_tokens: int) -> None:
    """A token store of zeros: uint16, shards of 1 GiB, a document every 1000 tokens."""
    sizes = [min(SHARD_BYTES, 2 * num_tokens - start) for start in range(0, 2 * num_tokens, SHARD_BYTES)]
    checksums: list[int] = []
    for number, size in enumerate(sizes):
        with (folder / f"shard-{number:05d}.bin").open("wb") as shard:
            shard.truncate(size)
        full, rest = divmod(size, CHUNK_BYTES)
        checksums += [zlib.crc32(bytes(CHUNK_BYTES))] * full + ([zlib.crc32(bytes(rest))] if rest else [])
    table = np.array(checksums, dtype=CHECKSUM).tobytes()
    documents = np.zeros(-(-num_tokens // DOCUMENT_TOKENS), dtype=DOCUMENT)
    documents["offset"] = np.arange(len(documents)) * DOCUMENT_TOKENS
    (folder / "checksums.bin").write_bytes(table)
    (folder / "documents.bin").write_bytes(documents.tobytes())
    index = {
        "format": FORMAT,
        "split": "train",
        "vocab_size": 50_257,
        "eot_id": 0,
        "tokenizer": "tokenizer.json",
        "tokenizer_sha256": "",
        "dtype": "<u2",
        "num_tokens": num_tokens,
        "num_documents": len(documents),
        "sources": ["zeros"],
        "documents_crc32": zlib.crc32(documents.tobytes()),
        "checksums_crc32": zlib.crc32(table),
        "shards": [{"name": f"shard-{n:05d}.bin", "num_tokens": size // 2} for n, size in enumerate(sizes)],
    }
    (folder / "index.json").write_text(json.dumps(index))


def measure_start(folder: Path, length: int, position: int) -> None:
    """Time from nothing to the first batch at a position in the middle of the second epoch."""
    start = time.perf_counter()
    store = TokenStore(folder)
    opened = time.perf_counter()
    mixture = Mixture(["zeros"], [1.0], [store.num_windows(length)], seed=1)
    next(iter(TokenStream(mixture, [store], length, start=position, micro_batch=8)))
    resumed = time.perf_counter()
    print(f"open {store.num_tokens:.0e} tokens: {1e3 * (opened - start):.1f} ms")
    print(f"first batch at sample {position:,}: {1e3 * (resumed - opened):.1f} ms")


def write_word_store(folder: Path, num_tokens: int) -> None:
    """A token store of ids with the frequencies of words, by Zipf's law."""
    ids = np.minimum(np.random.default_rng(0).zipf(1.2, num_tokens), 50_000)
    lengths = np.full(num_tokens // DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    options = {"vocab_size": 50_257, "eot_id": 0, "tokenizer": "tokenizer.json", "tokenizer_sha256": ""}
    with TokenStoreWriter(folder, split="train", **options) as writer:
        sources = Column(np.zeros(len(lengths), dtype=np.int32), ["words"])
        writer.add_many(ids[: lengths.sum()], lengths, sources, np.zeros(len(lengths), dtype=np.int32))


def measure_speed(
    folder: Path,
    length: int,
    micro_batch: int,
    num_workers: int,
    seconds: float,
    mask: MaskRepeats | None = None,
    order: SampleOrder = SHUFFLED,
) -> None:
    """Tokens per second through the loader, first touch of every chunk included."""
    store = TokenStore(folder)
    mixture = Mixture(["a", "b", "c"], [0.5, 0.3, 0.2], [store.num_windows(length)] * 3, seed=1, order=order)
    stream = TokenStream(mixture, [store] * 3, length, micro_batch=micro_batch, mask_repeats=mask)
    batches = iter(DataLoader(stream, batch_size=None, num_workers=num_workers))
    next(batches)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        next(batches)
        count += 1
    speed = count * micro_batch * length / (time.perf_counter() - start)
    print(
        f"{folder.name}, {store.num_tokens:.0e} tokens, T={length}, micro-batch {micro_batch}, {num_workers} workers, "
        f"order {order.by}, {'mask' if mask else 'no mask'}: {speed / 1e6:.2f}M tokens/s"
    )


def peak_mib() -> float:
    """Largest resident size of this process so far, in MiB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement of speed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        large, small = Path(name) / "large", Path(name) / "small"
        for folder, num_tokens in ((large, arguments.tokens), (small, QUICKSTART_TOKENS)):
            folder.mkdir()
            write_sparse_store(folder, num_tokens)
        before = peak_mib()
        measure_start(large, 1024, position=arguments.tokens * 3 // 2 // 1024)
        print(f"peak memory grew by {peak_mib() - before:.1f} MiB while opening and resuming")
        # In the small store every chunk is soon verified; in the large one nearly every window is a first touch.
        for folder, length, micro_batch in ((small, 256, 16), (large, 256, 16), (large, 2048, 8)):
            for num_workers in (0, 1):
                measure_speed(folder, length, micro_batch, num_workers, arguments.seconds)
        words = Path(name) / "words"
        write_word_store(words, QUICKSTART_TOKENS)
        for folder in (words, small):
            for num_workers in (0, 1):
                for mask in (None, MaskRepeats()) * 2:  # interleaved
                    measure_speed(folder, 2048, 8, num_workers, arguments.seconds, mask)
        for by in ("shuffle", "shards", "stored") * 2:
            measure_speed(words, 2048, 8, 0, arguments.seconds, order=SampleOrder(by))
        print(f"peak memory {peak_mib():.0f} MiB")


if __name__ == "__main__":
    main()
