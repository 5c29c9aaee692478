"""Grammars of an engine's requests: opens their masks, and reports to the engine when a grammar compiled or failed."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.request import Key, Request
from kvferry.engine.sampler import SampleRow
from kvferry.protocol.errors import KvferryError

Call = Callable[[], None]


class Grammars:
    """Grammars of an engine's requests: opens their masks and reports the outcome.

    It calls `compiled` or `failed` at once, on any thread, until `attach`."""

    def __init__(
        self, masks: GrammarMasks, compiled: Callable[[Key], None], failed: Callable[[Key, KvferryError], None]
    ) -> None:
        self._masks, self._compiled, self._failed = masks, compiled, failed
        self._post: Callable[[Call], None] = lambda call: call()

    def attach(self, post: Callable[[Call], None]) -> None:
        """Run these calls through `post` from now on: on the thread that owns the engine, before its next step."""
        self._post = post
        self._masks.wake = lambda: post(lambda: None)

    def open(self, request: Request) -> None:
        """Begin to compile; the request is in the table and waits for the grammar.

        Raises InvalidRequest if grammars cannot be used, and Overloaded."""
        job, key = request.job, request.key
        assert job.grammar is not None

        def done(error: KvferryError | None) -> None:
            self._post(lambda: self._compiled(key) if error is None else self._failed(key, error))

        request.sample_row = SampleRow(job.params, request.token_ids, job.prompt_len)
        mask = self._masks.open(job.grammar, job.params, request.token_ids, job.prompt_len, done)
        request.sample_row = SampleRow(job.params, request.token_ids, job.prompt_len, mask)

    def follow(self, request: Request) -> None:
        """Advance the request's mask by a token that another node drew."""
        row = request.sample_row
        assert row is not None
        assert row.mask is not None
        self._masks.advance([row.mask])
