"""Byte-level vocabularies of the ``tokenizers`` package, built or trained so that the same texts give the same file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import Model

OUR_END_OF_TEXT = "<|endoftext|>"

# Merges settle long before: a larger sample costs time and changes few of them. The unigram model's training holds
# every substring of its sample in memory, and where phrases are not cut, whole sentences; 20 times slower.
BPE_CHARACTERS = 200_000_000
UNIGRAM_CHARACTERS = 20_000_000
SCORE_DECIMALS = 4


def backend_class() -> type[Backend]:
    """The package's tokenizer, imported late."""
    # The package warns at every fork after it has used threads, hence at every start of data-loader workers. They do
    # not tokenise, so the choice may be stated.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer as Backend

    return Backend


def byte_backend() -> Backend:
    """Ids 0 to 255 are byte values, 256 is end-of-text."""
    from tokenizers import AddedToken, models

    # Byte-level tokenizers write bytes as visible characters: printable Latin-1 stands for itself, the others follow
    # from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    backend = _byte_level(models.BPE(vocab=vocabulary, merges=[]), cut="", use_regex=False)
    backend.add_special_tokens([AddedToken(OUR_END_OF_TEXT, special=True, normalized=False)])
    return backend


def train_bpe(size: int, cut: str | None, texts: Iterable[str]) -> Backend:
    """Byte-pair encoding; texts are cut by the expression ``cut``, None: as for GPT-2."""
    from tokenizers import models, pre_tokenizers, trainers

    backend = _byte_level(models.BPE(), cut, use_regex=cut is None)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[OUR_END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first_characters(texts, BPE_CHARACTERS), trainer)
    return backend


def train_unigram(size: int, cut: str | None, texts: Iterable[str]) -> Backend:
    """A unigram model over bytes; texts are cut by the expression ``cut``, None: as for GPT-2."""
    from tokenizers import models, pre_tokenizers, trainers

    backend = _byte_level(models.Unigram(), cut, use_regex=cut is None)
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=[OUR_END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first_characters(texts, UNIGRAM_CHARACTERS), trainer)
    return backend_class().from_str(_settled(backend.to_str()))


def _settled(tokenizer: str) -> str:
    """Free a trained unigram model of what changes from one training to the next.

    The package sums over a table without order: scores differ in their last bits, and bytes that training dropped get
    the lowest scores, 0.0001 apart, in any order. Scores are rounded, and those bytes are put in order.
    """
    content = json.loads(tokenizer)
    special, *pieces = content["model"]["vocab"]
    scores: dict[str, float] = dict(pieces)
    floor = min(scores.values()) + 256 * 1e-4
    dropped = sorted(piece for piece, score in scores.items() if len(piece) == 1 and score <= floor)
    scores.update(zip(dropped, sorted(scores[piece] for piece in dropped), strict=True))
    rounded = [(piece, round(score, SCORE_DECIMALS)) for piece, score in scores.items()]
    content["model"]["vocab"] = [special, *sorted(rounded, key=lambda entry: (-entry[1], entry[0]))]
    return json.dumps(content)


def _byte_level(model: Model, cut: str | None, *, use_regex: bool) -> Backend:
    from tokenizers import Regex, decoders, pre_tokenizers

    backend = backend_class()(model)
    bytes_as_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated"), bytes_as_characters])
        if cut
        else bytes_as_characters
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _first_characters(texts: Iterable[str], limit: int) -> Iterable[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text[:limit]
        limit -= len(text)
