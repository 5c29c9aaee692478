"""Incremental detokenizer that never emits half a character."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvferry.model_files.tokenizer import TextTokenizer

_CONTEXT = 6
_PATIENCE = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NOTHING: Mapping[int, str] = MappingProxyType({})


class Detokenizer(Protocol):
    """The concatenation of all `feed` results and `finish` is the text of the tokens. Each call is O(1)."""

    def feed(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """Return the rest: a replacement character for an incomplete character."""


def detokenizer(
    tokenizer: TextTokenizer,
    prompt: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown: Mapping[int, str] = _NOTHING,
) -> Detokenizer:
    """One sequence's detokenizer.

    `prompt` is what the output continues: it decides about a leading space. `shown` is what stands for some special
    tokens, whether others are skipped or not."""
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    if tokenizer.byte_level:
        return ByteDetokenizer(tokenizer, hidden.union(shown), shown)
    return WindowDetokenizer(tokenizer, hidden.union(shown), prompt, shown)


class ByteDetokenizer:
    """Detokenizer for vocabularies whose tokens are bytes: an incremental UTF-8 decoder is exact.

    Of hidden tokens what is `shown` for them is seen, if anything."""

    def __init__(self, tokenizer: TextTokenizer, hidden: frozenset[int], shown: Mapping[int, str] = _NOTHING) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden, self._shown = hidden, shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waits = False
        """Whether the decoder has the beginning of a character."""

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return self.finish() + self._shown[token_id] if token_id in self._shown else ""
        data = self._token_bytes(token_id)
        if not self._waits and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._waits = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        self._waits = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Detokenizer for any other decoder (SentencePiece, WordPiece, ...).

    It decodes a window of recent tokens twice, without and with the new ones, and emits the difference. window[:read]
    are tokens whose text was emitted; window[read:] are those that wait for the rest of a character, at most _PATIENCE
    of them: after that many, the bytes are no character."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        hidden: frozenset[int],
        prompt: Sequence[int] = (),
        shown: Mapping[int, str] = _NOTHING,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden, self._shown = hidden, shown
        self._window = [token_id for token_id in prompt[-_CONTEXT:] if token_id not in hidden]
        self._read = len(self._window)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return self._mark(token_id) if token_id in self._shown else ""
        self._window.append(token_id)
        text = self._fresh()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._read < _PATIENCE:
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        return text

    def finish(self) -> str:
        text = self._fresh()
        self._read = len(self._window)
        return text

    def _mark(self, token_id: int) -> str:
        """What is shown for a hidden token; the text behind it is decoded as behind the token."""
        rest = self.finish()
        self._window, self._read = [token_id], 1
        return rest + self._shown[token_id]

    def _fresh(self) -> str:
        before = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
