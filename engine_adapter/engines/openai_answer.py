"""Reader of one streamed OpenAI completion: token ids if the server sends them, else its text turned into tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.engine_adapter.engine import EngineDelta
from kvferry.engine_adapter.engine_errors import failure
from kvferry.engine_adapter.engines.openai_logprobs import of_text, of_tokens, rows_of
from kvferry.engine_adapter.text_tokens import TextTokens, TextVocabulary
from kvferry.protocol.errors import StepFailed
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import SamplingParams

_REASONS = {"stop": "stop", "eos_token": "stop", "stop_sequence": "stop", "length": "length"}
"""Finish reasons by the names that servers use."""


class Ended(Exception):
    """A token ended the output, but the server would continue; closing the connection stops it."""


class Answer:
    """Reads the events of one answer. vocabulary: None if the server returns token ids.

    last: the last delta, held until the usage that follows it; None: the output continues."""

    def __init__(
        self, params: SamplingParams, vocabulary: TextVocabulary | None, deliver: Callable[[EngineDelta], None],
        *, exact: bool,
    ) -> None:  # fmt: skip
        self._params, self._vocabulary, self._deliver = params, vocabulary, deliver
        self._ending = frozenset(params.ending_token_ids)
        self._text = TextTokens(vocabulary) if vocabulary and not exact else None
        self.last: EngineDelta | None = None
        self.tokens = 0
        self._usage: dict[str, Any] = {}

    def event(self, chunk: dict[str, Any]) -> None:
        """Take one event. Raises StepFailed or InvalidRequest for an error that the server sends, and Ended."""
        try:
            if (error := chunk.get("error")) or chunk.get("object") == "error":
                raise failure(error or chunk)
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk.get("choices") or ():
                if self.last is None and not choice.get("index"):
                    self._choice(choice)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StepFailed(f"the engine's answer cannot be read: {type(error).__name__} {error}") from error

    def end(self) -> None:
        """Deliver the end of the output. Raises StepFailed if the server did not send one."""
        if self.last is None:
            raise StepFailed("the engine's answer ended without a finish reason")
        details = self._usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            self.last.cached_tokens = int(details["cached_tokens"])
        self._count_end()
        self._deliver(self.last)

    def _choice(self, choice: dict[str, Any]) -> None:
        ids, rows = self._read(choice)
        reason = finish_reason(choice.get("finish_reason"))
        stops = next((at for at, token in enumerate(ids, start=1) if token in self._ending), 0)
        if self._text is None and stops:
            ids, rows = ids[:stops], rows and rows[:stops]
        if self._text is not None and reason is not None:
            rest = self._text.finish()
            ids, rows = ids + rest, rows and rows + tuple(TokenLogprobs(token, 0.0, 1) for token in rest)
        self.tokens += len(ids)
        if self._text is None and stops:
            self.last = EngineDelta(ids, rows, "stop")
            if reason is None:
                raise Ended
        elif reason is not None:
            self.last = EngineDelta(ids, rows, reason)
        elif ids:
            self._deliver(EngineDelta(ids, rows))

    def _read(self, choice: dict[str, Any]) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
        """Return the new tokens of a choice, and their log-probabilities if they are asked for."""
        wanted = self._params.logprobs
        reported = rows_of(choice.get("logprobs")) if wanted is not None else []
        if self._text is None:
            ids = token_ids(choice)
            if choice.get("text") and not ids:
                raise StepFailed("the engine's answer has text without token ids")
            return ids, None if wanted is None else of_tokens(ids, reported, wanted, self._vocabulary)
        text = choice.get("text") or ""
        ids = self._text.feed(text)
        if wanted is None or self._vocabulary is None:
            return ids, None
        return of_text(text, ids, reported, wanted, self._vocabulary) if ids else (ids, ())

    def _count_end(self) -> None:
        """Add the end-of-sequence token of a text, if the usage counts it, since text does not contain it."""
        last, eos = self.last, self._params.eos_token_ids
        if self._text is None or last is None or last.finish_reason != "stop" or not eos or last.logprobs is not None:
            return
        if self._usage.get("completion_tokens") == self.tokens + 1:
            last.token_ids += (eos[0],)


def token_ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """Return the token ids of a choice, under any name that servers use; empty if none."""
    for name in ("token_ids", "tokens"):
        found = choice.get(name)
        if isinstance(found, list) and found and all(type(each) is int for each in found):
            return tuple(found)
    return ()


def finish_reason(reported: Any) -> str | None:
    """Return stop, length or None. Raises StepFailed if the server ended the request for another reason."""
    if reported is None or reported == "":
        return None
    if reported not in _REASONS:
        raise StepFailed(f"the engine ended the request: {str(reported)[:100]}")
    return _REASONS[reported]
