"""TokenCache: cache of token ids by parts of long texts, so that only new text is encoded.

A long text is cut at places across which tokens cannot depend on each other, and its parts are cached. Cuts are found
from the beginning, so texts with a common prefix share parts. A cut is allowed after an ASCII character that is no
space and before a space followed by an ASCII letter: no known pattern looks across it, no normaliser composes across
it, and pairs are merged within words only. `cuts` checks once whether this holds for a tokenizer. Other tokenizers
encode whole texts, and so does a text with an added token that spans such a place."""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from sys import getsizeof
from typing import Any
from unicodedata import normalize

from tokenizers import Tokenizer, models

PART_CHARS = 4096
"""Length of a part up to the next allowed cut, in characters."""
MIN_CHARS = 2 * PART_CHARS
"""Shortest text that is cut, in characters; shorter ones are encoded whole in one or two milliseconds."""
MAX_BYTES = 2**26
"""Largest size of one model's cached parts and ids, in bytes; the least recently used are dropped."""
CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z])", re.ASCII)
_CASELESS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
PATTERNS = frozenset(
    (
        _CASELESS + "\\p{N}{1,3}" + _REST,  # Llama 3
        _CASELESS + "\\p{N}" + _REST,  # Qwen 2
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",  # GPT-2
    )
)
"""Pre-tokenizer patterns with which a word ends before a space and begins with it."""

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Encodes each text without the model's special tokens around it."""


class TokenCache:
    """Token cache of one tokenizer; safe for several threads.

    `encode` returns the ids of each text, without the model's special tokens around it."""

    def __init__(self, tokenizer: Tokenizer, encode: Encode, max_bytes: int = MAX_BYTES) -> None:
        self._encode, self._max_bytes = encode, max_bytes
        self._around = around(tokenizer) if cuts(tokenizer) else None
        self._parts: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def worth(self, text: str) -> bool:
        """Return whether the text may be cut and is long enough for it."""
        return self._around is not None and len(text) >= MIN_CHARS

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of the whole text, cut at allowed places."""
        assert self._around is not None
        parts = list(_parts(text))
        with self._lock:
            known = {part: found for part in parts if (found := self._parts.get(part)) is not None}
        new = [part for part in dict.fromkeys(parts) if part not in known]
        known.update((part, array("i", ids)) for part, ids in zip(new, self._encode(new), strict=True))
        self._keep(known)
        before, after = self._around if add_special_tokens else ((), ())
        whole = list(before)
        for part in parts:
            whole.extend(known[part])
        whole.extend(after)
        return whole

    def _keep(self, used: dict[str, array[int]]) -> None:
        with self._lock:
            for part, ids in used.items():
                if part not in self._parts:
                    self._parts[part] = ids
                    self._bytes += _size(part, ids)
                self._parts.move_to_end(part)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(*self._parts.popitem(last=False))


def _size(part: str, ids: array[int]) -> int:
    """Return the size in bytes; characters outside ASCII take up to four bytes and as many ids."""
    return getsizeof(part) + getsizeof(ids)


def cuts(tokenizer: Tokenizer) -> bool:
    """Return whether texts may be cut as the module describes."""
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
    return (
        isinstance(model, models.BPE)
        and not model.dropout
        and not (model.unk_token and model.fuse_unk)
        and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        and not any(CUT.search(normalize("NFC", token.content) + "a") for token in added)
        and all(step["type"] == "NFC" for step in _steps(tokenizer.normalizer, "normalizers"))
        and _splits(_steps(tokenizer.pre_tokenizer, "pretokenizers"))
        and tokenizer.truncation is None
        and tokenizer.padding is None
    )


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the special ids before and after a text; None if they may depend on it."""
    kinds = {step["type"] for step in _steps(tokenizer.post_processor, "processors")}
    found = tokenizer.encode("a", add_special_tokens=True)
    own = [place for place, special in enumerate(found.special_tokens_mask) if not special]
    if not own or not kinds <= {"ByteLevel", "TemplateProcessing"}:
        return None
    return found.ids[: own[0]], found.ids[own[-1] + 1 :]


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a part of the tokenizer; `inner` is the name of a sequence's list of steps."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [step for each in state[inner] for step in flat(each)] if state["type"] == "Sequence" else [state]

    return [] if part is None else flat(json.loads(part.__getstate__()))


def _splits(steps: Sequence[dict[str, Any]]) -> bool:
    """Return whether words are found by known patterns and encoded as bytes."""
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return False
    found = steps[-1]["use_regex"]
    for step in steps[:-1]:
        if step["type"] == "Split":
            if step["pattern"].get("Regex") not in PATTERNS or step["behavior"] != "Isolated" or step["invert"]:
                return False
            found = True
        elif step["type"] != "Digits":
            return False
    return bool(found)


def _parts(text: str) -> Iterator[str]:
    begin = 0
    while cut := CUT.search(text, begin + PART_CHARS):
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]
