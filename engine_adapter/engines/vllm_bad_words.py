"""Texts for vLLM's bad_words, which takes no tokens, that ban exactly the token sequences of a request.

vLLM encodes each text without and with a leading space. So the server itself is asked what its tokenizer makes of the
texts, and a request is refused if that is not what it bans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.protocol.errors import InvalidRequest, StepFailed

MAX_KNOWN = 1024
"""Maximum number of sets of sequences whose texts are remembered."""

Sequences = tuple[tuple[int, ...], ...]


class BadWordTexts:
    """Texts of one server's tokenizer. model: returns the name of the served model."""

    def __init__(self, http: EngineHttp, model: Callable[[], str]) -> None:
        self._http, self._model = http, model
        self._known: OrderedDict[frozenset[tuple[int, ...]], tuple[str, ...]] = OrderedDict()

    async def of(self, sequences: Sequences) -> tuple[str, ...]:
        """Return the texts; raise InvalidRequest if none ban exactly these sequences."""
        due = frozenset(sequences)
        if (known := self._known.get(due)) is not None:
            self._known.move_to_end(due)
            return known
        try:
            found = await self._find(due)
        except StepFailed as error:
            raise InvalidRequest(
                f"bad_words is not supported: this model's engine has no tokenizer ({error.message})", param="bad_words"
            ) from error
        self._known[due] = found
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return found

    async def _find(self, due: frozenset[tuple[int, ...]]) -> tuple[str, ...]:
        words: dict[str, None] = {}
        banned: set[tuple[int, ...]] = set()
        for sequence in sorted(due):
            word = (await self._text(sequence)).lstrip()
            if word in words:
                continue
            words[word] = None
            bare = await self._tokens(word) if word else ()
            if bare:
                banned |= _banned(bare, await self._tokens(f" {word}"))
        if banned != due:
            raise InvalidRequest(
                "bad_words has a sequence of tokens that this model's engine, which takes texts, cannot ban exactly",
                param="bad_words",
            )
        return tuple(words)

    async def _text(self, tokens: Iterable[int]) -> str:
        reported = await self._post("/detokenize", {"tokens": [*tokens]})
        return str(reported["prompt"])

    async def _tokens(self, text: str) -> tuple[int, ...]:
        reported = await self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return tuple(reported["tokens"])

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reported: dict[str, Any] = await self._http.post(path, {"model": self._model(), **body})
        return reported


def _banned(bare: tuple[int, ...], spaced: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return what vLLM bans for a text with these tokens without and with a leading space."""
    differs = bool(spaced) and spaced[0] != bare[0] and len(spaced) == len(bare)
    return {bare, spaced} if differs else {bare}
