"""Turn text into token ids and back: bytes, a vocabulary trained on the spot, or a tokenizer file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_stable.data.tokenizer_training import OUR_END_OF_TEXT, backend_class, byte_backend, train_bpe, train_unigram

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# In the order in which they are looked for in a tokenizer file: ours and GPT-2's, Llama 3's, Llama 2's, Gemma's.
END_OF_TEXT = (OUR_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")

# Where texts are cut before a vocabulary is applied, so that no token crosses a cut. `phrases` lets tokens hold several
# words and makes every digit its own (Wu et al. 2023, "BloombergGPT", arXiv:2303.17564, section 2.3).
CUTS = {"gpt2": None, "phrases": "[ A-Za-z]+|[0-9]|[^A-Za-z0-9]+"}
SPECS = "bytes, bpe:SIZE, unigram:SIZE, either with :phrases or :REGEX behind it, or the path of a tokenizer.json"
SMALLEST = 257  # 256 bytes and end-of-text
LARGEST = 1 << 31  # ids are held in 32 bits


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
        if not is_unicode(text):
            raise ValueError(f"text {text!r}: is not UTF-8; give it in that encoding.")
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; end-of-text shows as its name, a cut character as U+FFFD."""
        return str(self._backend.decode([int(id_) for id_ in ids], skip_special_tokens=False))

    @property
    def sha256(self) -> str:
        """Of the bytes that ``save`` writes."""
        return hashlib.sha256(self._content).hexdigest()

    def save(self, path: Path) -> str:
        """Write a tokenizer JSON and return the SHA-256 of its bytes."""
        path.write_bytes(self._content)
        return self.sha256

    @property
    def _content(self) -> bytes:
        return self._backend.to_str(pretty=False).encode()


def is_unicode(text: str) -> bool:
    """Whether there are bytes for it: what the command line cannot decode comes as half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer JSON, as written by ``Tokenizer.save`` or found beside a published model.

    Raises:
        ValueError: when the file is missing, unreadable or has no end-of-text token.
    """
    backend = backend_class()
    if not path.is_file():
        raise ValueError(f"tokenizer={path}: no such file; give bytes, bpe:SIZE or the path of a tokenizer.json.")
    try:
        loaded = backend.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for any flaw of the file
        raise ValueError(f"tokenizer={path}: is not a tokenizer JSON ({error}).") from error
    return Tokenizer(loaded)


class Training(NamedTuple):
    """What a spec says of a vocabulary to be trained: its kind, its size, and the expression that cuts texts."""

    kind: str
    size: str
    cut: str | None


def is_trained(spec: str) -> bool:
    """Whether the tokenizer that ``spec`` names comes into being from texts."""
    return spec.startswith(("bpe:", "unigram:"))


def check_tokenizer_spec(spec: str) -> str | None:
    """The problem with ``spec`` in one sentence, or None."""
    if is_trained(spec):
        training = _parse_spec(spec)
        if not training.size.isdecimal() or int(training.size) < SMALLEST:
            return f"tokenizer={spec}: the size must be an integer of at least {SMALLEST} (256 bytes and end-of-text)."
        if int(training.size) > LARGEST:
            return f"tokenizer={spec}: the size must be at most {LARGEST:,}."
        return _cut_problem(spec, training.cut)
    if spec != "bytes" and not Path(spec).expanduser().is_file():
        return f"tokenizer={spec}: no such file; give {SPECS}."
    return None


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that ``spec`` names.

    Args:
        spec: ``bytes`` (ids 0-255 are byte values, end-of-text is 256); ``bpe:SIZE`` (byte-level BPE with SIZE ids,
            Radford et al. 2019) or ``unigram:SIZE`` (a unigram model of bytes, Kudo 2018, arXiv:1804.10959), trained on
            the first characters of ``texts``; or a tokenizer JSON's path. ``:phrases`` or ``:REGEX`` behind a size says
            where texts are cut first; without it they are as for GPT-2.
        texts: Read only when there is something to train.

    Raises:
        ValueError: see ``check_tokenizer_spec`` and ``load_tokenizer``.
    """
    problem = check_tokenizer_spec(spec)
    if problem is not None:
        raise ValueError(problem)
    if spec == "bytes":
        return Tokenizer(byte_backend())
    if not is_trained(spec):
        return load_tokenizer(Path(spec).expanduser())
    training = _parse_spec(spec)
    train = train_bpe if training.kind == "bpe" else train_unigram
    return Tokenizer(train(int(training.size), training.cut, texts))


def _parse_spec(spec: str) -> Training:
    kind, size, *cut = spec.split(":", 2)
    name = cut[0] if cut else "gpt2"
    return Training(kind, size, CUTS.get(name, name))


def _cut_problem(spec: str, cut: str | None) -> str | None:
    if cut is None:
        return None
    from tokenizers import Regex

    try:
        Regex(cut)
    except Exception as error:  # the package raises bare Exception
        return f"tokenizer={spec}: {cut!r} is neither phrases, gpt2 nor a regular expression ({error})."
    return None if cut else f"tokenizer={spec}: the expression behind the last colon must not be empty."
