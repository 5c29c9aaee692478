"""Transfer: a prompt fetched from another engine, checked by its first token, which both engines draw.

An engine reads blocks by their numbers and checks nothing: a reference that is too old gives wrong tokens. So the first
token is drawn twice, by both engines, and it must come before the reference's lease ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvferry.engine_adapter.engine import EngineDelta
from kvferry.protocol.errors import BlocksCorrupt, KvferryError, TransferFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.process_names import NodeName

COMPARED_TOKENS = 8
"""Number of output tokens, including the first, that a canary compares."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Transfer of one prompt.

    sender       the prefill node
    reference    see EngineCall
    length       tokens of the prompt
    first_token  drawn by the other engine; None in a room, where it comes with the blocks
    ends_at      when the reference's lease ends, in seconds of `clock`
    exact        whether two engines of this kind always draw the same token
    landed       done when the first token has come, or the attempt has failed
    tokens       the first COMPARED_TOKENS tokens of the output"""

    sender: NodeName
    reference: str
    length: int
    first_token: int | None
    ends_at: float
    exact: bool
    clock: Callable[[], float] = time.monotonic
    landed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    tokens: list[int] = field(default_factory=list)

    def continuing_job(self, job: Job) -> Job:
        """Return the job with the first token among the delivered ones, so that it is not delivered twice."""
        known = job.token_ids[self.length :]
        if known or self.first_token is None:
            return job
        return replace(job, token_ids=(*job.token_ids, self.first_token))

    def check(self, delta: EngineDelta) -> None:
        """Check output before it is delivered. Raises TransferFailed, or BlocksCorrupt if the engines must agree."""
        if not self.tokens and (delta.token_ids or delta.finish_reason is not None):
            if self.clock() >= self.ends_at:
                raise TransferFailed("the first token came after the lease of the prompt's blocks had ended")
            if self.first_token is None and delta.token_ids:
                self.first_token = delta.token_ids[0]
            if delta.token_ids[:1] != (self.first_token,):
                kind = BlocksCorrupt if self.exact else TransferFailed
                raise kind(f"{self.sender[0]} drew another first token than this engine after the transfer")
            if not self.landed.done():
                self.landed.set_result(None)
        self.tokens.extend(delta.token_ids[: COMPARED_TOKENS - len(self.tokens)])

    def fail(self, error: KvferryError) -> None:
        """Let the prefill node know that the attempt failed, if the blocks had not arrived."""
        if not self.landed.done():
            self.landed.set_exception(error)
            self.landed.exception()  # marks the exception as seen: the prefill node may be gone
