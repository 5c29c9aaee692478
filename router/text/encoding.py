"""Tokenization that does not block the event loop.

The library's `encode` keeps the interpreter to itself for as long as it takes, its batch calls do not. A text that
cannot fit is refused by its length, or, where its tokens may be long, as soon as its first slices exceed the context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvferry.protocol.errors import ContextLengthExceeded, InvalidRequest
from kvferry.router.text.length_bound import reach_of
from kvferry.router.text.text_model import TextModel
from kvferry.router.text.token_cache import TokenCache
from kvferry.router.text.tokenizer_threads import SHORT, TokenizerThreads
from kvferry.router.text.word_cache import WordCache

T = TypeVar("T")

LONG_CHARS = 6144
"""Texts shorter than this, together, are encoded where they are, in two milliseconds: a thread costs one."""
PLAIN_CHARS = 8
"""Per token of the context: a longer text is counted in slices first. Languages and code stay far below it."""
FALLBACK_CHARS = 256
"""Per token of the context, where the tokenizer itself sets no bound."""
MOST_TOKENS = 2**20
"""Of one request's texts together, where nothing else is said."""
TRUNCATED_CHARS = 2**20
"""Of a text whose tail is wanted, whatever the context: all of it must be encoded."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound on the texts of a request, each by itself.

    tokens     of the context
    field      where the texts are, for errors
    truncated  more tokens than that are welcome: only some of them are used, or none
    """

    tokens: int
    field: str
    truncated: bool = False


class Encoder:
    """Encoder of one model.

    Long texts share a few threads; who waits for one may be cancelled. most: tokens of all texts of one request, which
    a single text of the context's length may exceed."""

    def __init__(self, text: TextModel, most: int = MOST_TOKENS) -> None:
        self._text, self._most = text, most
        self._reach = reach_of(text.tokenizer.library)
        self._lanes = TokenizerThreads()
        encode = partial(text.encode_all, add_special_tokens=False)
        self._memo, self._words = TokenCache(text.tokenizer.library, encode), WordCache(text.tokenizer.library, encode)

    def short(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text shorter than LONG_CHARS, on the event loop."""
        encode = self._words.ids if self._words.apart else self._text.encode
        return encode(text, add_special_tokens=add_special_tokens)

    async def encode(self, texts: Sequence[str], bound: Bound, *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text.

        Raises ContextLengthExceeded for one that certainly has more than `bound.tokens`; InvalidRequest for one that is
        too long to be truncated here, and for too many of them."""
        for text in texts:
            self._check_length(text, bound)
        encode = partial(self._text.encode, add_special_tokens=add_special_tokens)
        if sum(map(len, texts)) < LONG_CHARS:
            return [self.short(text, add_special_tokens=add_special_tokens) for text in texts]
        remembered = partial(self._memo.ids, add_special_tokens=add_special_tokens)
        found: list[list[int]] = []
        tokens, all_chars = 0, sum(map(len, texts))
        for group in _groups(texts):
            for text in group:
                if not bound.truncated and len(text) > PLAIN_CHARS * bound.tokens:
                    await self._check_slices(text, bound)
            ids = await self.beside(
                lambda some: [(remembered if self._memo.worth(text) else encode)(text) for text in some],
                group,
                size=sum(map(len, group)),
                of=all_chars,
            )
            tokens += sum(map(len, ids))
            if len(texts) > 1 and tokens > self._most:
                raise InvalidRequest(
                    f"{bound.field} has more than {self._most} tokens in all, the most that one request may bring here",
                    param=bound.field,
                )
            found += ids
        return found

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], bound: Bound) -> list[tuple[list[int], int]]:
        """Each pair as one text, and where its second one begins. Raises as `encode` does."""
        for text in {text for pair in pairs for text in pair}:
            self._check_length(text, bound)
        found: list[tuple[list[int], int]] = []
        for pair in pairs:
            if len(pair[0]) + len(pair[1]) < LONG_CHARS:
                found.append(self._text.encode_pair(*pair))
                await asyncio.sleep(0)
            else:
                found.append(await self.beside(self._text.encode_pair, *pair, size=sum(map(len, pair))))
        return found

    async def beside(self, call: Callable[..., T], *args: Any, size: int = SHORT, of: int = 0) -> T:
        """The result of `call(*args)`, from a thread: see Lanes."""
        return await self._lanes.run(call, *args, size=size, of=of)

    def _check_length(self, text: str, bound: Bound) -> None:
        most = self._reach.most(bound.tokens)
        limit = FALLBACK_CHARS * bound.tokens if most is None else most
        if bound.truncated:
            limit = max(limit, TRUNCATED_CHARS)
        if len(text) <= limit or (most is not None and not bound.truncated and self._reach.least(text) <= limit):
            return
        if bound.truncated:
            raise InvalidRequest(
                f"{bound.field} has {len(text)} characters; at most {limit} can be truncated to tokens here",
                param=bound.field,
            )
        raise _too_long(bound, f"which {len(text)} characters cannot fit into")

    async def _check_slices(self, text: str, bound: Bound) -> None:
        """Count tokens slice by slice until they are certainly too many: a cut adds less than a slice's hundredth."""
        count, encode = 0, partial(self._text.encode, add_special_tokens=False)
        for part in _slices(text):
            count += len(await self.beside(encode, part, size=len(part), of=len(text)))
            if count > bound.tokens * 1.05 + 1000:
                raise _too_long(bound, f"but the first {count} of the prompt are only a part of it")


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, short ones together up to a slice: a thread for each would cost more than its work."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > SHORT:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), SHORT):
        yield text[start : start + SHORT]


def _too_long(bound: Bound, why: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's maximum context length is {bound.tokens} tokens, {why}; shorten the prompt", param=bound.field
    )
