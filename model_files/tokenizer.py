"""Reads a model's tokenizer with the `tokenizers` library, and turns token ids into text and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.gguf_tokenizer import build_tokenizer
from kvferry.model_files.source import MAX_VOCAB, ModelSource
from kvferry.model_files.tekken import TEKKEN, build_tekken
from kvferry.protocol.errors import ConfigError, reason


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from the printable characters of a byte-level vocabulary to the bytes they stand for."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + place): byte for place, byte in enumerate(moved)}


BYTE_ALPHABET = _byte_alphabet()


class TextTokenizer:
    """Vocabulary of one model: turns token ids into text. `TextModel.encode` is the other direction.

    Thread-safe.

    library       tokenizer of the `tokenizers` library
    special_ids   tokens without text of their own, skipped in output unless asked for
    byte_level    a token is a sequence of bytes, so text is the plain concatenation of `token_bytes`
    byte_tokens   bytes by token, of a vocabulary that falls back to tokens of single bytes (SentencePiece)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self.library = tokenizer
        self._added = {index: token.content for index, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        steps = _decoder_steps(tokenizer)
        self.byte_level = steps == ["ByteLevel"]
        self.byte_tokens = _byte_tokens(tokenizer) if "ByteFallback" in steps else {}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= MAX_VOCAB:  # grammars take memory for every id up to it
            raise ConfigError(f"the tokenizer has a token of id {largest}; the limit is {MAX_VOCAB - 1}", param="model")
        self._closing = _closing(tokenizer)

    @classmethod
    def from_directory(cls, path: Path) -> TextTokenizer:
        """Read a directory's tokenizer.json, else its tekken.json. Raises ConfigError."""
        file = path / "tokenizer.json"
        if not file.is_file() and (tekken := path / TEKKEN).is_file():
            with _reading(tekken):
                return cls(build_tekken(tekken, {byte: char for char, byte in BYTE_ALPHABET.items()}))
        if not file.is_file():
            raise ConfigError(
                f"{path} has no tokenizer.json; create it once with AutoTokenizer.from_pretrained(...).save_pretrained",
                param="model",
            )
        with _reading(file):
            return cls(Tokenizer.from_file(str(file)))

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Return the spellings of special tokens, none of them empty."""
        return tuple(text for index in self.special_ids if (text := self._added[index]))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of these tokens."""
        text: str = self.library.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def cut(self, ids: Sequence[int], tokens: int) -> list[int]:
        """Return an encoded text without its end, at most `tokens` long. The special tokens that close it stay."""
        if len(ids) <= tokens:
            return list(ids)
        closing = min(self._closing, tokens)
        return [*ids[: tokens - closing], *ids[len(ids) - closing :]]

    def token(self, token_id: int) -> str:
        """Return the vocabulary's own spelling; empty for ids without one (padded vocabularies)."""
        return self.library.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text (no space is stripped at its beginning)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._to_bytes(token_id)
        return found

    def _to_bytes(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token_id in self._added:
            return token.encode()
        if self.byte_level:
            return (
                bytes(BYTE_ALPHABET[char] for char in token) if BYTE_ALPHABET.keys() >= set(token) else token.encode()
            )
        return self.byte_tokens.get(token_id) or token.replace("▁", " ").encode()


def load_tokenizer(source: ModelSource) -> TextTokenizer:
    """Return the tokenizer in a model's files. Raises ConfigError."""
    if source.kind == "gguf":
        with _reading(source.path):
            return TextTokenizer(build_tokenizer(read_gguf(source.path).metadata))
    return TextTokenizer.from_directory(source.path)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn whatever the `tokenizers` library or a damaged file raises into a ConfigError that names the file."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and a panic of Rust, which is none
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise ConfigError(f"cannot read the tokenizer of {file}: {reason(error)}", param="model") from error


def _closing(tokenizer: Tokenizer) -> int:
    """Return how many special tokens the tokenizer puts after a text."""
    marks = tokenizer.encode("a").special_tokens_mask
    return next((count for count, mark in enumerate(reversed(marks)) if not mark), 0)


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the single bytes that tokens such as <0x0A> stand for."""
    found = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes((byte,)) for byte in range(256)}
    return {token_id: byte for token_id, byte in found.items() if token_id is not None}


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """Return the kinds of the decoder's steps, in order."""
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps]


def _is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust failed an assertion of its own, which is not a Python Exception."""
    return type(error).__name__ == "PanicException"
