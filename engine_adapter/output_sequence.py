"""Output of one attempt: numbers the engine's tokens, and drops those already delivered after comparing them.

An attempt that continues a stream gets the prompt and the delivered tokens. An engine with that guarantee continues
after them. Otherwise the engine computes the whole output again; what it repeats is compared and dropped."""

from __future__ import annotations

from dataclasses import replace

from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.protocol.errors import ReplayDiffers
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse


def resumes(job: Job, guarantees: tuple[str, ...]) -> bool:
    """Return whether the engine can continue after the delivered tokens exactly as an undisturbed run would.

    Penalties on the output's tokens forget what was delivered, as do banned sequences of several tokens, and a grammar
    starts at its root: those are replayed."""
    params = job.params
    if any(len(word) > 1 for word in params.bad_words):
        return False
    if job.grammar is not None or params.frequency_penalty or params.presence_penalty:
        return False
    return ("greedy_resume" if params.temperature == 0 else "seeded_resume") in guarantees


def length_of(job: Job, guarantees: tuple[str, ...]) -> int:
    """Return the number of the job's tokens in its call: all, or only the prompt if the rest is replayed."""
    return len(job.token_ids) if len(job.token_ids) > job.prompt_len and resumes(job, guarantees) else job.prompt_len


def call_of(job: Job, request_id: str, adapter: str, length: int) -> EngineCall:
    """Return the engine call of an attempt.

    adapter: name of the LoRA adapter, empty: none. length: see `length_of`."""
    params, delivered = job.params, length - job.prompt_len
    if delivered:
        params = replace(
            params,
            max_tokens=params.max_tokens - delivered,
            min_tokens=max(0, params.min_tokens - delivered),
        )
    return EngineCall(request_id, job.token_ids[:length], params, job.grammar, adapter, job.namespace, job.media)


class OutputSequence:
    """Translates an attempt's engine output into deltas of its request. length: see `length_of`."""

    def __init__(self, job: Job, length: int) -> None:
        self._job, self._length = job, length
        self._expected, self._index = job.token_ids[job.prompt_len :], length - job.prompt_len
        self._ending = frozenset(job.params.ending_token_ids)

    def push(self, delta: EngineDelta) -> TokenDelta | None:
        """Return the delta for the router; None if there is nothing new.

        Raises ReplayDiffers where a repeated token differs from the delivered one, or the output ends before it."""
        tokens, logprobs, start = delta.token_ids, delta.logprobs, self._index
        if start < len(self._expected):
            due = self._expected[start : start + len(tokens)]
            same = next((at for at, pair in enumerate(zip(tokens, due, strict=False)) if pair[0] != pair[1]), len(due))
            ends = delta.finish_reason is not None and start + len(tokens) < len(self._expected)
            if same < len(due) or ends:
                raise ReplayDiffers(f"output token {start + same} of the engine differs from the lost node's")
            tokens, logprobs = tokens[len(due) :], logprobs and logprobs[len(due) :]
            start += len(due)
        self._index = start + len(tokens)
        if not tokens and delta.finish_reason is None and delta.prompt_logprobs is None:
            return None
        stops = delta.finish_reason == "stop" and tokens and tokens[-1] in self._ending
        return TokenDelta(
            self._job.request_id,
            self._job.attempt,
            start,
            tokens,
            logprobs,
            delta.finish_reason,
            tokens[-1] if stops else None,
            self._reuse(delta.cached_tokens),
            delta.prompt_logprobs,
        )

    def _reuse(self, cached: int | None) -> Reuse | None:
        """Return the reuse of the tokens that the router sent; a replay computes the delivered ones."""
        if cached is None:
            return None
        cached, total = min(cached, self._length), len(self._job.token_ids)
        return Reuse(total, reused_decode=cached, computed=total - cached)
