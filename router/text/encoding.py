"""Encoder: tokenizes prompts (long ones on threads), and rejects those that cannot fit the context early.

The library's `encode` holds the GIL for its whole duration; its batch calls do not. A text that cannot fit is rejected
by its length. If its tokens may be long, it is rejected as soon as its first slices exceed the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvferry.protocol.errors import ContextLengthExceeded, InvalidRequest
from kvferry.router.text.length_bound import length_bound_of
from kvferry.router.text.text_model import TextModel
from kvferry.router.text.token_cache import TokenCache
from kvferry.router.text.tokenizer_threads import SHORT_CHARS, TokenizerThreads
from kvferry.router.text.word_cache import WordCache

T = TypeVar("T")

LONG_CHARS = 6144
"""Total length from which texts are encoded on a thread; shorter ones take 2 ms, and a thread costs 1 ms."""
PLAIN_CHARS = 8
"""Characters per token of the context above which a text is first counted in slices.

Languages and code stay far below it."""
FALLBACK_CHARS = 256
"""Largest number of characters per token of the context if the tokenizer sets no bound."""
MAX_TOKENS = 2**20
"""Default limit of the tokens of all texts of one request."""
TRUNCATED_CHARS = 2**20
"""Minimum limit of a text to be truncated, in characters: all of it must be encoded."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound on each text of a request.

    tokens     length of the context
    field      field of the texts, for errors
    truncated  texts may have more tokens, since only some of them are used
    """

    tokens: int
    field: str
    truncated: bool = False


class Encoder:
    """Text encoder of one model.

    Long texts share a few threads; callers that wait for one may be cancelled. `max_tokens` limits the tokens of all
    texts of a request; a single text may have as many tokens as the context."""

    def __init__(self, text: TextModel, max_tokens: int = MAX_TOKENS) -> None:
        self._text, self._max_tokens = text, max_tokens
        self._length_bound = length_bound_of(text.tokenizer.library)
        self._lanes = TokenizerThreads()
        encode = partial(text.encode_all, add_special_tokens=False)
        self._memo, self._words = TokenCache(text.tokenizer.library, encode), WordCache(text.tokenizer.library, encode)

    def short(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text shorter than LONG_CHARS, on the event loop."""
        encode = self._words.ids if self._words.apart else self._text.encode
        return encode(text, add_special_tokens=add_special_tokens)

    async def encode(self, texts: Sequence[str], bound: Bound, *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text.

        Raises ContextLengthExceeded for a text that certainly exceeds `bound.tokens`, and InvalidRequest for a text
        that is too long to be truncated and for too many tokens in total."""
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
            ids = await self.on_thread(
                lambda some: [(remembered if self._memo.worth(text) else encode)(text) for text in some],
                group,
                size=sum(map(len, group)),
                of=all_chars,
            )
            tokens += sum(map(len, ids))
            if len(texts) > 1 and tokens > self._max_tokens:
                raise InvalidRequest(
                    f"{bound.field} has more than {self._max_tokens} tokens in total, the limit of one request",
                    param=bound.field,
                )
            found += ids
        return found

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], bound: Bound) -> list[tuple[list[int], int]]:
        """Return the token ids of each pair and the index of its second text; raise as `encode`."""
        for text in {text for pair in pairs for text in pair}:
            self._check_length(text, bound)
        found: list[tuple[list[int], int]] = []
        for pair in pairs:
            if len(pair[0]) + len(pair[1]) < LONG_CHARS:
                found.append(self._text.encode_pair(*pair))
                await asyncio.sleep(0)
            else:
                found.append(await self.on_thread(self._text.encode_pair, *pair, size=sum(map(len, pair))))
        return found

    async def on_thread(self, call: Callable[..., T], *args: Any, size: int = SHORT_CHARS, of: int = 0) -> T:
        """Return the result of `call(*args)`, run on a thread; see TokenizerThreads.run."""
        return await self._lanes.run(call, *args, size=size, of=of)

    def _check_length(self, text: str, bound: Bound) -> None:
        max_chars = self._length_bound.max_chars(bound.tokens)
        limit = FALLBACK_CHARS * bound.tokens if max_chars is None else max_chars
        if bound.truncated:
            limit = max(limit, TRUNCATED_CHARS)
        if len(text) <= limit or (
            max_chars is not None and not bound.truncated and self._length_bound.min_chars(text) <= limit
        ):
            return
        if bound.truncated:
            raise InvalidRequest(
                f"{bound.field} has {len(text)} characters; at most {limit} can be truncated to tokens here",
                param=bound.field,
            )
        raise _too_long(bound, f"too few for {len(text)} characters")

    async def _check_slices(self, text: str, bound: Bound) -> None:
        """Count tokens by slices until they are certainly too many; a cut adds less than 1 % of a slice."""
        count, encode = 0, partial(self._text.encode, add_special_tokens=False)
        for part in _slices(text):
            count += len(await self.on_thread(encode, part, size=len(part), of=len(text)))
            if count > bound.tokens * 1.05 + 1000:
                raise _too_long(bound, f"but the prompt is longer than its first {count}")


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in order, grouping short ones up to a slice, since a thread for each would cost more."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > SHORT_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), SHORT_CHARS):
        yield text[start : start + SHORT_CHARS]


def _too_long(bound: Bound, why: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's maximum context length is {bound.tokens} tokens, {why}; shorten the prompt", param=bound.field
    )
