"""LengthBound: maximum characters per token of a tokenizer, to reject texts that cannot fit without encoding them.

A tokenizer is a pipeline in which every step may drop text: a normalizer that composes characters, a pre-tokenizer that
drops spaces, a byte without a token. An unknown step means that there is no bound."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, models

from kvferry.model_files.tokenizer import BYTE_ALPHABET

_FACTORS = {"NFC": 4.0, "NFKC": 4.0, "NFD": 1.0, "NFKD": 1.0, "Lowercase": 1.0, "Prepend": 1.0, "ByteLevel": 1.0}
"""Largest number of characters that a normalizer turns into one; Unicode composes at most four."""
_CUTTING = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts", "FixedLength"))
"""Pre-tokenizers that only cut the text, unless their behavior is `removed`."""
_SPACES = " \t\r\n\f\v"
_CONTINUATION = range(0x80, 0xC0)
"""UTF-8 continuation bytes; every character outside ASCII has at least one."""

State = Mapping[str, Any]


class LengthBound:
    """Length bound of one tokenizer, in characters.

    A token is spelt with at least as many characters as it covers, or with its bytes, and a character has at least one
    byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        free = _free(tokenizer, vocabulary)
        self._free = "" if free is None else free
        self._per_token = None if free is None else _per_token(tokenizer, vocabulary)
        if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
            self._free += "".join(char for char in _SPACES if char not in self._free)

    def max_chars(self, tokens: int) -> int | None:
        """Return the largest number of characters for `tokens` tokens; None if there is no bound."""
        return None if self._per_token is None else math.ceil(tokens * self._per_token)

    def min_chars(self, text: str) -> int:
        """Return the number of characters of `text` that need a token."""
        return len(text) - sum(map(text.count, self._free))


@lru_cache(maxsize=16)
def length_bound_of(tokenizer: Tokenizer) -> LengthBound:
    """Return the tokenizer's length bound, cached because it scans the whole vocabulary."""
    return LengthBound(tokenizer)


def _per_token(tokenizer: Tokenizer, vocabulary: Mapping[str, int]) -> float | None:
    cuts = all(_only_cuts(step) for step in _steps(tokenizer.pre_tokenizer, "pretokenizers"))
    factors = [_factor(step) for step in _steps(tokenizer.normalizer, "normalizers")]
    known = [factor for factor in factors if factor is not None]
    if not cuts or len(known) < len(factors):
        return None
    return max(map(len, vocabulary)) * math.prod(known)


def _steps(part: Any, inner: str) -> list[State]:
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    return list(state[inner]) if state["type"] == "Sequence" else [state]


def _factor(step: State) -> float | None:
    if step["type"] == "Replace":
        pattern, content = step["pattern"].get("String"), step["content"]
        return max(1.0, len(pattern) / len(content)) if pattern and content else None
    return _FACTORS.get(step["type"])


def _only_cuts(step: State) -> bool:
    return step["type"] in _CUTTING and str(step.get("behavior", "")).lower() != "removed"


def _free(tokenizer: Tokenizer, vocabulary: Mapping[str, int]) -> str | None:
    """Return the ASCII characters that the tokenizer drops for lack of a token.

    None if other characters may be dropped, or if many may become one unknown token."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    spelt: Callable[[int], str]
    if model.byte_fallback:
        spelt = "<0x{:02X}>".format
    elif "ByteLevel" in {step["type"] for step in _steps(tokenizer.pre_tokenizer, "pretokenizers")}:
        spelt = {byte: char for char, byte in BYTE_ALPHABET.items()}.__getitem__
    else:
        return None
    if any(spelt(byte) not in vocabulary for byte in _CONTINUATION):
        return None
    missing = [byte for byte in range(0x80) if spelt(byte) not in vocabulary]
    return None if missing and model.unk_token else "".join(map(chr, missing))
