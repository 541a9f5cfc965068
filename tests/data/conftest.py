from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lit_stable.data.store import TokenStore
from lit_stable.data.store_writer import TokenStoreWriter
from lit_stable.data.tokenizer import make_tokenizer

MakeStore = Callable[..., TokenStore]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Build a store of given documents, or of one document with tokens 0, 1, 2, ... modulo 250."""

    def make(
        name: str = "store",
        documents: Sequence[Sequence[int]] | None = None,
        num_tokens: int = 1000,
        shard_bytes: int = 65_536,
        source: str = "text",
    ) -> TokenStore:
        sha256 = make_tokenizer("bytes", []).save(tmp_path / "tokenizer.json")
        with TokenStoreWriter(
            tmp_path / name,
            vocab_size=257,
            eot_id=256,
            tokenizer="../tokenizer.json",
            tokenizer_sha256=sha256,
            split="train",
            shard_bytes=shard_bytes,
        ) as writer:
            for ids in documents or [np.arange(num_tokens - 1) % 250]:
                writer.add(ids, source)
        return TokenStore(tmp_path / name)

    return make


@pytest.fixture
def make_writer_store(tmp_path: Path) -> Callable[[list[tuple[list[int], str]]], TokenStore]:
    """Build a store of documents that come from several sources."""

    def make(documents: list[tuple[list[int], str]]) -> TokenStore:
        sha256 = make_tokenizer("bytes", []).save(tmp_path / "tokenizer.json")
        options = {"vocab_size": 257, "eot_id": 256, "tokenizer": "../tokenizer.json", "tokenizer_sha256": sha256}
        with TokenStoreWriter(tmp_path / "mixed", split="validation", **options) as writer:
            for ids, source in documents:
                writer.add(np.array(ids), source)
        return TokenStore(tmp_path / "mixed")

    return make
