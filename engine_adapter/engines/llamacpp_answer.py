"""Reader of one streamed answer of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvferry.engine_adapter.engine import EngineDelta
from kvferry.engine_adapter.engine_errors import failure
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import SamplingParams


class Answer:
    """Reads the events of one answer. tokenized: returns the tokens of a text.

    The server streams a character of several tokens with its last token alone: the others follow from the character's
    text, as the tokenizer spells it. ended: the output has its last token. reported_end: the server reported it."""

    def __init__(
        self,
        params: SamplingParams,
        tokenized: Callable[[str], Awaitable[tuple[int, ...]]],
        deliver: Callable[[EngineDelta], None],
    ) -> None:
        self._params, self._tokenized, self._deliver = params, tokenized, deliver
        self._ending = frozenset(params.ending_token_ids)
        self._predicted = 0
        self._cached: int | None = None
        self.ended = self.reported_end = False

    async def take(self, chunk: dict[str, Any]) -> None:
        """Take one event. Raises StepFailed or InvalidRequest for an error that the server sends."""
        if (error := chunk.get("error")) is not None:
            raise failure(error)
        if (progress := chunk.get("prompt_progress")) is not None:  # its `tokens` mean nothing
            self._cached = int(progress["cache"])
            return
        tokens, logprobs = await self._tokens(chunk)
        stops = next((at for at, token in enumerate(tokens, start=1) if token in self._ending), 0)
        if stops:
            tokens, logprobs = tokens[:stops], logprobs and logprobs[:stops]
        self.reported_end = bool(chunk.get("stop"))
        self.ended = bool(stops) or self.reported_end
        reason = None if not self.ended else "stop" if stops or chunk.get("stop_type") == "eos" else "length"
        if tokens or self.ended:
            self._deliver(EngineDelta(tokens, logprobs, reason, self._cached_tokens(chunk)))

    async def _tokens(self, chunk: dict[str, Any]) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
        """Return all tokens of the event's text; those that the server omitted get log-probability 0."""
        reported = tuple(chunk.get("tokens") or ())
        predicted = int(chunk.get("tokens_predicted") or 0)
        left_out = predicted - self._predicted - len(reported)
        self._predicted = predicted
        tokens = reported
        if left_out > 0 and reported and chunk.get("content"):
            tokens = await self._tokenized(chunk["content"])
        if self._params.logprobs is None:
            return tokens, None
        rows = [
            _row(row, self._params.logprobs) for row in (chunk.get("completion_probabilities") or [])[: len(reported)]
        ]
        known = {row.token_id: row for row in rows}
        return tokens, tuple(
            known.get(token, TokenLogprobs(token, 0.0, 1)) if at >= len(tokens) - len(reported) else
            TokenLogprobs(token, 0.0, 1)
            for at, token in enumerate(tokens)
        )  # fmt: skip

    def _cached_tokens(self, chunk: dict[str, Any]) -> int | None:
        """Return the reused prompt tokens: from the progress of the prompt; of older servers, from the last event."""
        if self._cached is None and (found := (chunk.get("timings") or {}).get("cache_n")) is not None:
            self._cached = int(found)
        return self._cached


def _row(row: dict[str, Any], most: int) -> TokenLogprobs:
    top = tuple((each["id"], each["logprob"]) for each in row.get("top_logprobs") or ())
    rank = next((at for at, each in enumerate(top, start=1) if each[0] == row["id"]), len(top) + 1)
    return TokenLogprobs(row["id"], row["logprob"], rank, top[:most])
