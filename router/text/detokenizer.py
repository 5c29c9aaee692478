"""Incremental detokenizers for byte-level, byte-fallback and other vocabularies; they emit only whole characters."""

from __future__ import annotations

import codecs
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring
from types import MappingProxyType
from typing import Protocol

from kvferry.model_files.tokenizer import TextTokenizer

_CONTEXT = 6
_MAX_CHAR_TOKENS = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NOTHING: Mapping[int, str] = MappingProxyType({})


class Detokenizer(Protocol):
    """Incremental detokenizer; the results of all `feed` calls and `finish` form the text. Each call is O(1)."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """Return the rest: a replacement character for an incomplete character."""

    def escaped(self, token_ids: Iterable[int]) -> bytes:
        """Return the text of these tokens escaped for JSON if each has whole characters of its own; empty: `feed` them.

        It changes nothing: such tokens leave no state."""


class EscapedTexts(dict[int, bytes | None]):
    """Texts of tokens of whole characters, escaped for JSON and made on first use; None for other tokens."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._token_bytes, self._hidden = token_bytes, hidden

    def __missing__(self, token_id: int) -> bytes | None:
        made = None
        if token_id not in self._hidden:
            with contextlib.suppress(UnicodeDecodeError):
                made = encode_basestring(self._token_bytes(token_id).decode())[1:-1].encode()
        self[token_id] = made
        return made


escaped_texts = lru_cache(maxsize=8)(EscapedTexts)
"""Texts that all sequences of a model share."""


def detokenizer(
    tokenizer: TextTokenizer,
    prompt: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown: Mapping[int, str] = _NOTHING,
) -> Detokenizer:
    """Return a detokenizer of one sequence.

    `prompt` precedes the output and decides about a leading space. `shown` maps special tokens to the text shown for
    them, whether other special tokens are skipped or not."""
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    if shown:
        hidden = hidden.union(shown)
    if tokenizer.byte_level:
        return ByteDetokenizer(tokenizer, hidden, shown)
    if tokenizer.byte_tokens:
        return FallbackDetokenizer(tokenizer, hidden, prompt, shown)
    return WindowDetokenizer(tokenizer, hidden, prompt, shown)


class ByteDetokenizer:
    """Exact detokenizer for vocabularies whose tokens are bytes, with an incremental UTF-8 decoder.

    Hidden tokens appear as the text `shown` for them, if any."""

    def __init__(self, tokenizer: TextTokenizer, hidden: frozenset[int], shown: Mapping[int, str] = _NOTHING) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden, self._shown = hidden, shown
        self._escaped = escaped_texts(tokenizer.token_bytes, hidden)
        self._decoder: codecs.IncrementalDecoder | None = None
        """Made for the first text beyond ASCII."""
        self._waits = False
        """True while the decoder holds an incomplete character."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes."""
        if token_id in self._hidden:
            return self.finish() + self._shown[token_id] if token_id in self._shown else ""
        data = self._token_bytes(token_id)
        if not self._waits and data.isascii():
            return data.decode("ascii")
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoder.decode(data)
        self._waits = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return the rest: a replacement character for an incomplete character."""
        self._waits = False
        return self._decoder.decode(b"", True) if self._decoder is not None else ""

    def escaped(self, token_ids: Iterable[int]) -> bytes:
        if self._waits:
            return b""
        try:
            return b"".join(map(self._escaped.__getitem__, token_ids))  # type: ignore[arg-type]
        except TypeError:
            return b""


class _ContextDetokenizer(ABC):
    """Detokenizer whose tokens are decoded together with the `_CONTEXT` tokens before them."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        hidden: frozenset[int],
        prompt: Sequence[int] = (),
        shown: Mapping[int, str] = _NOTHING,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden, self._shown = hidden, shown
        self._begin([token_id for token_id in prompt[-_CONTEXT:] if token_id not in hidden])

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes."""
        if token_id not in self._hidden:
            return self._next(token_id)
        if token_id not in self._shown:
            return ""
        rest = self.finish()
        self._begin([token_id])
        return rest + self._shown[token_id]

    def escaped(self, token_ids: Iterable[int]) -> bytes:
        return b""

    @abstractmethod
    def finish(self) -> str:
        """Return the rest: a replacement character for an incomplete character."""

    @abstractmethod
    def _begin(self, context: list[int]) -> None:
        """Begin after these tokens, whose text is not emitted."""

    @abstractmethod
    def _next(self, token_id: int) -> str:
        """Return the text that this token, which is not hidden, completes."""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class FallbackDetokenizer(_ContextDetokenizer):
    """Detokenizer for SentencePiece with byte fallback: an incremental UTF-8 decoder for byte tokens.

    All other tokens are decoded together with the `_CONTEXT` tokens before them, whose text is left out. A character
    that begins in the prompt's last tokens and ends in the output belongs to the output."""

    def finish(self) -> str:
        """Return the rest: a replacement character for an incomplete character."""
        return self._decoder.decode(b"", True)

    def _begin(self, context: list[int]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._context = deque[int](maxlen=_CONTEXT)
        for token_id in context:
            self._next(token_id)

    def _next(self, token_id: int) -> str:
        byte = self._tokenizer.byte_tokens.get(token_id, b"")
        before = list(self._context)
        self._context.append(token_id)
        if byte and (before or not byte.isascii()):
            return self._decoder.decode(byte)
        text = self._decode([*before, token_id])
        return self.finish() + text[len(self._decode(before)) :]


class WindowDetokenizer(_ContextDetokenizer):
    """Detokenizer for any other decoder (WordPiece and others).

    It decodes a window of recent tokens without and with the new ones, and emits the difference. The text of
    window[:read] is emitted. The tokens window[read:] wait for the rest of a character; after _MAX_CHAR_TOKENS of them
    the bytes are treated as invalid."""

    def finish(self) -> str:
        """Return the text of the tokens that still wait."""
        text = self._fresh()
        self._read = len(self._window)
        return text

    def _begin(self, context: list[int]) -> None:
        self._window, self._read = context, len(context)

    def _next(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._fresh()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._read < _MAX_CHAR_TOKENS:
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        return text

    def _fresh(self) -> str:
        before = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(before) :]
