"""Canary checks: a decode node's engine computes a sample of the transferred prompts again, and tokens are compared.

Two engines draw the first token of each transferred prompt. That finds most wrong blocks, but not all: a token can be
right by chance. So for a share of the requests the engine computes the prompt itself, under its own cache salt, and the
first few tokens must be equal. Only requests with repeatable tokens, as measured, are checked. Transfers
from a node are all checked until one agrees, and again after one that differs.

An engine whose tokens depend on the batch differs now and then although the blocks are right. There, two checks of one
node must differ in a row before it is reported. Nothing waits for a check; there is one at a time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace

from kvferry.engine_adapter.engine import Engine, EngineCall, EngineDelta
from kvferry.engine_adapter.transfer import Transfer
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.messages import Deviation, Job
from kvferry.protocol.process_names import NodeName

log = logging.getLogger("kvferry.adapter")

KNOWN = 4096
"""Maximum number of senders remembered as having agreed."""
MAX_S = 120.0
"""Maximum duration of a check, in seconds."""


class TransferCanary:
    """Canary checks of one decode node, on the asyncio loop.

    rate        share of transferred requests that are checked, 0 to 1; 0: none
    guarantees  what the engine keeps, see `protocol.lease.GUARANTEES`
    report      called with the router and the message for it
    counted     called with the outcome, agreed, differed or dropped, and the sender"""

    def __init__(
        self,
        engine: Engine,
        rate: float,
        guarantees: tuple[str, ...],
        report: Callable[[str, Deviation], None],
        counted: Callable[[str, NodeName], None] = lambda outcome, sender: None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._engine, self._rate, self._guarantees = engine, rate, guarantees
        self._report, self._counted, self._draw = report, counted, draw
        self._agreed: OrderedDict[NodeName, None] = OrderedDict()
        self._differed: Counter[NodeName] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._salt, self._checks = f"canary-{time.time_ns()}", 0

    @property
    def needed(self) -> int:
        """Return how many checks of a sender must differ in a row."""
        return 1 if "batch_invariant" in self._guarantees else 2

    def arrived(self, job: Job, call: EngineCall, transfer: Transfer) -> None:
        """Check a request whose blocks came from another engine, if it is chosen."""
        repeats = "greedy_replay" if call.params.temperature == 0 else "seeded_replay"
        if not self._rate or self._task is not None or repeats not in self._guarantees or call.adapter:
            return
        if transfer.sender in self._agreed and self._draw() >= self._rate:
            return
        self._checks += 1
        params = replace(call.params, max_tokens=len(transfer.tokens), min_tokens=0, logprobs=None)
        if call.params.min_tokens:
            params = replace(params, min_tokens=min(call.params.min_tokens, params.max_tokens))
        again = replace(
            call, request_id=f"{call.request_id}-canary", params=params, reference="",
            cache_salt=f"{self._salt}-{self._checks}",
        )  # fmt: skip
        self._task = asyncio.create_task(self._check(job, again, transfer), name="canary")

    def stop(self) -> None:
        """Drop the running check."""
        if self._task is not None:
            self._task.cancel()

    async def _check(self, job: Job, call: EngineCall, transfer: Transfer) -> None:
        tokens: list[int] = []

        def deliver(delta: EngineDelta) -> None:
            tokens.extend(delta.token_ids)

        try:
            async with asyncio.timeout(MAX_S):
                await self._engine.generate(call, deliver)
            self._compared(job, transfer, tokens)
        except (KvferryError, TimeoutError) as error:
            log.info("the canary cannot recompute the prompt of %s: %s", job.request_id, error)
            self._counted("dropped", transfer.sender)
        finally:
            self._task = None

    def _compared(self, job: Job, transfer: Transfer, tokens: list[int]) -> None:
        sender = transfer.sender
        if tokens == transfer.tokens:
            self._differed.pop(sender, None)
            self._agreed[sender] = None
            if len(self._agreed) > KNOWN:
                self._agreed.popitem(last=False)
            self._counted("agreed", sender)
            return
        self._counted("differed", sender)
        self._agreed.pop(sender, None)
        self._differed[sender] += 1
        log.warning("the tokens of %s after blocks from %s differ from those computed here", job.request_id, sender[0])
        if self._differed[sender] >= self.needed:
            self._report(job.router_id, Deviation(job.request_id, sender))
