"""Requests that have a grammar: they await its compilation, and their masks follow their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.masks import Masks
from engine.request import Request
from engine.sampler import SampleRow
from engine.states import Awaits
from protocol.errors import KvferryError

if TYPE_CHECKING:
    from engine.engine import Engine

Post = Callable[[Callable[["Engine"], None]], None]
"""Runs a call on the engine thread before the next step."""


def held_up(request: Request) -> bool:
    """Whether it takes no turn now: the mask of its grammar is not made."""
    row = request.sample_row
    return row is not None and row.mask is not None and row.mask.blocks


class Grammars:
    """Opens masks for an engine. Until `attach` their news are called at once, on whatever thread they come from."""

    def __init__(self, engine: Engine, masks: Masks) -> None:
        self._post: Post = lambda call: call(engine)
        self._masks = masks

    def attach(self, post: Post) -> None:
        """From now on an engine thread owns the engine."""
        self._post = post
        self._masks.wake = lambda: post(lambda engine: None)

    def open(self, request: Request) -> None:
        """Begin to compile; the request is here and awaits that. Raises InvalidRequest where no grammars are read, and
        Overloaded."""
        job, key = request.job, request.key
        assert job.grammar is not None

        def done(error: KvferryError | None) -> None:
            if error is None:
                self._post(lambda engine: engine.resume(key, Awaits.GRAMMAR))
            else:
                self._post(lambda engine: engine.fail(key, error))

        request.sample_row = SampleRow(job.params, request.token_ids, job.prompt_len)
        mask = self._masks.open(job.grammar, job.params, request.token_ids, job.prompt_len, done)
        request.sample_row = SampleRow(job.params, request.token_ids, job.prompt_len, mask)

    def follow(self, request: Request) -> None:
        """The request was given a token from elsewhere."""
        row = request.sample_row
        assert row is not None
        assert row.mask is not None
        self._masks.advance([row.mask])
