"""Two decode nodes in the test's own process, between which streams move over real HTTP and UCX."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.engine.engine import Engine
from kvferry.protocol.messages import Job, MoveRequest
from tests.toy import VOCAB, expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, worker

MOST = 200


def prompt(seed: int = 0, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


class Both:
    """A router's side of a node that is left and one that takes over."""

    def __init__(self, source: Router, target: Router) -> None:
        self.source, self.target = source, target

    async def streams(self, name: str, steps: int = 15) -> Job:
        """A stream at the source, stopped in its middle."""
        job = make_job(name, prompt(len(name)), MOST)
        self.source.decode.pause_at(steps)
        await self.source.generate(job)
        await until(lambda: self.source.decode.paused)
        return job

    async def move(self, job: Job, later: int = 1) -> httpx.Response:
        request = MoveRequest(job.request_id, job.attempt, later, self.target.decode.target)
        return await self.source._post(self.source.decode, "move", request)

    def tokens(self, name: str) -> list[int]:
        return self.source.tokens(name) + self.target.tokens(name)

    @contextlib.contextmanager
    def frozen_once_it_stands(self) -> Iterator[threading.Event]:
        """The target's link, from when a stream of the source stands still on; the event tells that it does."""
        moving, stands = self.source.decode.engine.moving, threading.Event()
        stand = moving.snapshot
        with contextlib.ExitStack() as frozen:

            def standing(transfer: int) -> Any:
                stood = stand(transfer)
                if not stands.is_set():
                    frozen.enter_context(self.target.decode.frozen_link())
                    stands.set()
                return stood

            moving.snapshot = standing  # type: ignore[method-assign]
            yield stands

    async def finished(self, job: Job) -> None:
        await until(lambda: self.target.finished(job.request_id))
        assert self.tokens(job.request_id) == expected(list(job.token_ids), MOST)

    async def settle(self) -> None:
        await self.source.decode.settle()
        await self.target.decode.settle()


def _slow(engine: Engine) -> None:
    """A step takes as long as on a device of medium size: some are made while blocks travel."""
    run = engine.runner.run

    def slowly(*step: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return run(*step, **named)

    engine.runner.run = slowly  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def decode_pair(**settings: Any) -> AsyncIterator[Both]:
    """A router's view of both nodes, connected; settings of the one that is left."""
    engines = [make_engine(600), make_engine(600)]
    for engine in engines:
        _slow(engine)
    store = MemoryStore()
    async with (
        worker("decode", engines[0], store=store, node_id="a", **settings) as source,
        worker("decode", engines[1], store=store, node_id="b") as target,
    ):
        routers = [Router(None, node, "router") for node in (source, target)]  # type: ignore[arg-type]
        for router in routers:
            await router.connect()
        try:
            yield Both(*routers)
        finally:
            for router in routers:
                await router.close()
