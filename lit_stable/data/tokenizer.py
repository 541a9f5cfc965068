"""Turn text into token ids and back: bytes, byte-pair encoding trained on the spot, or a tokenizer file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import Model

# In the order in which they are looked for in a tokenizer file: ours and GPT-2's, Llama 3's, Llama 2's, Gemma's.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

# Merges settle long before: a larger sample costs time and changes few of them.
TRAINING_CHARACTERS = 200_000_000


class Tokenizer:
    """A tokenizer of the ``tokenizers`` package with what a token store needs, no more.

    Nothing in a text is special: a document that spells out ``<|endoftext|>`` gets the ids of those characters.

    Raises:
        ValueError: when the vocabulary has no end-of-text token.
    """

    def __init__(self, backend: Backend) -> None:
        vocabulary = backend.get_vocab(with_added_tokens=True)
        found = [vocabulary[name] for name in END_OF_TEXT if name in vocabulary]
        if not found:
            raise ValueError(f"tokenizer: has none of the end-of-text tokens {', '.join(END_OF_TEXT)}; add one.")
        self.eot_id: int = found[0]
        self.vocab_size: int = max(vocabulary.values()) + 1
        self._backend = backend
        self._backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of each text, int64 (N,), without any begin or end token."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without any begin or end token."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; end-of-text shows as its name, a cut character as U+FFFD."""
        return str(self._backend.decode([int(id_) for id_ in ids], skip_special_tokens=False))

    def save(self, path: Path) -> str:
        """Write a tokenizer JSON and return the SHA-256 of its bytes."""
        content = self._backend.to_str(pretty=False).encode()
        path.write_bytes(content)
        return hashlib.sha256(content).hexdigest()


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer JSON, as written by ``Tokenizer.save`` or found beside a published model.

    Raises:
        ValueError: when the file is missing, unreadable or has no end-of-text token.
    """
    backend = _backend_class()
    if not path.is_file():
        raise ValueError(f"tokenizer={path}: no such file; give bytes, bpe:SIZE or the path of a tokenizer.json.")
    try:
        loaded = backend.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for any flaw of the file
        raise ValueError(f"tokenizer={path}: is not a tokenizer JSON ({error}).") from error
    return Tokenizer(loaded)


def check_tokenizer_spec(spec: str) -> str | None:
    """The problem with ``spec`` in one sentence, or None."""
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not size.isdigit() or int(size) < 257:
            return f"tokenizer={spec}: the size must be an integer of at least 257 (256 bytes and end-of-text)."
    elif spec != "bytes" and not Path(spec).is_file():
        return f"tokenizer={spec}: no such file; give bytes, bpe:SIZE or the path of a tokenizer.json."
    return None


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that ``spec`` names.

    Args:
        spec: ``bytes`` (ids 0-255 are byte values, end-of-text is 256), ``bpe:SIZE`` (byte-level BPE with SIZE ids,
            Radford et al. 2019, trained on the first 200 million characters of ``texts``) or a tokenizer JSON's path.
        texts: Read only when there is something to train.

    Raises:
        ValueError: see ``check_tokenizer_spec`` and ``load_tokenizer``.
    """
    problem = check_tokenizer_spec(spec)
    if problem is not None:
        raise ValueError(problem)
    if spec == "bytes":
        return _byte_tokenizer()
    if spec.startswith("bpe:"):
        return _train_bpe(int(spec.removeprefix("bpe:")), texts)
    return load_tokenizer(Path(spec))


def _backend_class() -> type[Backend]:
    # The package warns at every fork after it has used threads, hence at every start of data-loader workers. They do
    # not tokenise, so the choice may be stated.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer as Backend

    return Backend


def _byte_level(model: Model, *, use_regex: bool) -> Backend:
    backend = _backend_class()(model)
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, models

    # Byte-level tokenizers write bytes as visible characters: printable Latin-1 stands for itself, the others follow
    # from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    backend = _byte_level(models.BPE(vocab=vocabulary, merges=[]), use_regex=False)
    backend.add_special_tokens([AddedToken(END_OF_TEXT[0], special=True, normalized=False)])
    return Tokenizer(backend)


def _train_bpe(size: int, texts: Iterable[str]) -> Tokenizer:
    from tokenizers import models, pre_tokenizers, trainers

    backend = _byte_level(models.BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first_characters(texts, TRAINING_CHARACTERS), trainer)
    return Tokenizer(backend)


def _first_characters(texts: Iterable[str], limit: int) -> Iterable[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text[:limit]
        limit -= len(text)
