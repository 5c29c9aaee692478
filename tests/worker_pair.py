"""A prefill and a decode node in the test's own process: real HTTP, real UCX between them, the toy model in each."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import httpx

import kvferry.worker.node as node_module
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.decode_worker.service import DecodeService
from kvferry.elastic_worker.service import ElasticService
from kvferry.encode_worker.service import EncodeService
from kvferry.engine.engine import Engine
from kvferry.engine.runner import Runner
from kvferry.prefill_worker.service import PrefillService
from kvferry.protocol.media import with_data, without_data
from kvferry.protocol.messages import (
    AttemptFailed,
    CancelRequest,
    DecodeTarget,
    Deviation,
    GenerateRequest,
    Job,
    PrefillRequest,
    StepFrame,
    TokenDelta,
)
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.stream_messages import FrameAck
from kvferry.protocol.wire import FrameReader, pack
from kvferry.runtime.signals import StopSignal
from kvferry.worker.engine_parts import EngineParts
from kvferry.worker.media_loading import NodeMedia
from kvferry.worker.node import Ending, Node
from kvferry.worker.runtime import WorkerRuntime
from tests.toy import FINGERPRINT, ToyModel, make_engine
from tests.waiting import until

PATIENCE_S = 15.0
SERVICES: dict[str, Any] = {"prefill": PrefillService, "decode": DecodeService, "encode": EncodeService}
"""Of nodes that keep their role."""


class Worker:
    """One running node. `pause_at` stops the engine before that step, counted from when it was set, until `resume`."""

    def __init__(self, node: Node, engine: Engine, run: asyncio.Task[Ending], stop: StopSignal) -> None:
        self.node, self.engine, self.run, self.stop = node, engine, run, stop
        self.paused = self.link_lost = False
        self._go = threading.Event()
        self._steps_left: int | None = None
        self._step = engine.runner.run
        engine.runner.run = self._run_step  # type: ignore[method-assign]

    @property
    def loaded(self) -> WorkerRuntime:
        assert self.node.loaded
        return self.node.loaded

    @property
    def service(self) -> Any:
        return self.loaded.service

    @property
    def target(self) -> DecodeTarget:
        return self.loaded.lease().target

    def pause_at(self, step: int) -> None:
        self._go.clear()
        self._steps_left = step

    def resume(self) -> None:
        self._steps_left = None
        self._go.set()

    def _run_step(self, *step: Any, **options: Any) -> Any:
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left < 0:
                self.paused = True
                self._go.wait(PATIENCE_S)
                self.paused = False
        return self._step(*step, **options)

    @contextlib.contextmanager
    def frozen_engine(self) -> Iterator[None]:
        """The engine thread takes no command and runs no step."""
        with _frozen(lambda call: self.loaded.engine.submit(lambda engine: call())):
            yield

    @contextlib.contextmanager
    def frozen_link(self) -> Iterator[None]:
        """The link thread neither sends nor receives."""
        with _frozen(self.loaded.link.submit):
            yield

    async def lose_link(self) -> None:
        """Every connection breaks, as when the process dies, and none comes again."""
        self.link_lost = True
        self.loaded.unwatch()
        await asyncio.to_thread(self.loaded.link.stop)

    async def settle(self) -> None:
        """Nothing is under way and every block is back. Fails if that does not come about."""
        self.resume()
        await until(lambda: not self._remains())
        done = asyncio.get_running_loop().create_future()

        def check(engine: Engine) -> None:
            try:
                engine.check_integrity()
                result: BaseException | None = None
            except AssertionError as error:
                result = error
            self.loaded.call_soon(lambda: done.set_exception(result) if result else done.set_result(None))

        self.loaded.engine.submit(check)
        await asyncio.wait_for(done, PATIENCE_S)
        assert self.engine.pool.available == self.engine.pool.num_blocks
        assert not self.node.metrics.account_violations._value.get()
        load = self.loaded.engine.load
        assert load.free_blocks + load.cached_blocks == load.total_blocks

    def _remains(self) -> object:
        engine, service = self.engine, self.service
        tables = [
            engine.transfer_holds.ships,
            engine.transfer_holds.grants,
            engine.moving._transfer_holds,
            engine.request_table._attempts,
        ]
        tables += [engine.copies._transfer_holds, engine.copies._landing]
        mounted = service.endpoints
        tables += [mounted.tiers._waiting, mounted.tiers._in_flight]
        tables += [mounted.fetches._waiting, mounted.fetches._open, mounted.fetches._in_flight]
        tables += [mounted.fetches._client.transfers, mounted.supplies._supplies]
        if not self.link_lost:
            tables += [mounted.arrivals._open, mounted.sender.transfers, mounted.arrivals.receiver.transfers]
        if mounted.embeddings is not None:
            tables += [mounted.embeddings._open, mounted.embeddings._coming]
        halves: list[Any] = [service.prefill, service.decode] if isinstance(service, ElasticService) else [service]
        halves = [half for half in halves if not isinstance(half, EncodeService)]
        for half in halves:
            prefills = isinstance(half, PrefillService)
            tables += [half._answers, half._ships._offers] if prefills else [half._replication._making]
        return self.loaded.engine.busy or service.busy() or any(tables)


@contextlib.contextmanager
def _frozen(submit: Callable[[Callable[[], Any]], None]) -> Iterator[None]:
    stopped, go = threading.Event(), threading.Event()

    def wait() -> None:
        stopped.set()
        go.wait(PATIENCE_S)

    submit(wait)
    assert stopped.wait(PATIENCE_S)
    try:
        yield
    finally:
        go.set()


@dataclass
class Answer:
    """What a router reads of one `POST /attempts/prefill`."""

    task: asyncio.Task[None]
    messages: list[Any] = field(default_factory=list)
    status: int = 0
    error: dict[str, Any] = field(default_factory=dict)

    async def ended(self) -> list[Any]:
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE_S)
        return self.messages

    async def hang_up(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Router:
    """A router's side of both nodes; `deltas` and `failed` come from its standing stream of the decode node."""

    def __init__(self, prefill: Worker, decode: Worker, name: str) -> None:
        self.prefill, self.decode, self.name = prefill, decode, name
        self.deltas: list[TokenDelta] = []
        self.failed: list[AttemptFailed] = []
        self.deviations: list[Deviation] = []
        self.frames = 0
        self._http = httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S)
        self.seen = 0
        self._stream: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        self.frames = 0
        self._stream = asyncio.create_task(self._read_stream())
        await until(lambda: self.frames)

    async def hang_up(self) -> None:
        """Close the standing stream."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.gather(self._stream, return_exceptions=True)

    async def close(self) -> None:
        await self.hang_up()
        await self._http.aclose()

    def post_prefill(self, job: Job, target: DecodeTarget | None = None) -> Answer:
        answer = Answer(None)  # type: ignore[arg-type]
        answer.task = asyncio.create_task(self._read_answer(answer, PrefillRequest(job, target)))
        return answer

    async def generate(self, job: Job) -> httpx.Response:
        return await self._post(self.decode, "generate", GenerateRequest(job))

    async def cancel(self, job: Job, *workers: Worker) -> None:
        for worker in workers or (self.prefill, self.decode):
            response = await self._post(worker, "cancel", CancelRequest(job.request_id, job.attempt))
            assert response.status_code == 202

    def tokens(self, request_id: str) -> list[int]:
        """Output tokens from the decode node, which must come in order."""
        deltas = [d for d in self.deltas if d.request_id == request_id]
        assert [d.index for d in deltas] == list(range(deltas[0].index, deltas[0].index + len(deltas))) if deltas else 1
        return [token for delta in deltas for token in delta.token_ids]

    def finished(self, request_id: str) -> bool:
        return any(d.request_id == request_id and d.finish_reason for d in self.deltas)

    async def _post(self, worker: Worker, path: str, message: Any) -> httpx.Response:
        return await self._http.post(f"{worker.node.address.url}/attempts/{path}", content=_packed(message))

    async def _read_answer(self, answer: Answer, request: PrefillRequest) -> None:
        url = f"{self.prefill.node.address.url}/attempts/prefill"
        async with self._http.stream("POST", url, content=_packed(request)) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                await response.aread()
                answer.error = response.json()["error"]
                return
            reader = FrameReader()
            async for data in response.aiter_raw():
                answer.messages += reader.feed(data)

    async def _read_stream(self) -> None:
        url = f"{self.decode.node.address.url}/streams/{self.name}"
        asked = {"epoch": self.decode.target.epoch}
        acknowledged = time.monotonic()
        async with self._http.stream("GET", url, params=asked) as response:
            reader = FrameReader()
            async for data in response.aiter_raw():
                for frame in reader.feed(data):
                    assert isinstance(frame, StepFrame)
                    self.frames += 1
                    self.deltas += frame.deltas
                    self.failed += frame.failed
                    self.deviations += frame.deviations
                    self.seen = frame.number
                if time.monotonic() > acknowledged + 1.0:
                    acknowledged = time.monotonic()
                    await self._http.post(f"{url}/seen", content=pack(FrameAck(self.seen)))


def _packed(message: Any) -> bytes:
    """A message as a router sends it, with its media's data behind it."""
    job = getattr(message, "job", None)
    if job is None or not job.media:
        return pack(message)
    return b"".join(with_data(pack(replace(message, job=replace(job, media=without_data(job.media)))), job.media))


def of_toy(engine: Engine, media: NodeMedia | None = None) -> EngineParts:
    """All that is assembled around an engine of a toy model."""
    info = engine.runner.model.info
    layout = info.layout(ToyModel.dtype, engine.config.block_size)
    kv = cast(Runner, engine.runner).kv
    return EngineParts(engine, kv, info, layout, FINGERPRINT, engine.longest, media=media)


@contextlib.asynccontextmanager
async def worker(
    role: str, engine: Engine | EngineParts, *, store: MemoryStore | None = None, state: str = "ready", **settings: Any
) -> AsyncIterator[Worker]:
    """A node of its own registry, once it is in this state; ended with SIGINT. It drains though it is the last one.
    engine: of a toy model, or all that was assembled around another one."""
    settings.setdefault("respawned", True)
    parts = engine if isinstance(engine, EngineParts) else of_toy(engine)
    stop = StopSignal()
    with (
        patch.object(node_module, "assemble", lambda settings, progress: parts),
        patch.object(node_module, "RedisStore", lambda url, cluster, **options: store or MemoryStore()),
    ):
        service = ElasticService if settings.get("elastic") else SERVICES[role]
        node = Node(WorkerSettings(role=role, **settings), service)
        run = asyncio.create_task(node.run(stop))
        await until(lambda: node.state == state or run.done())
    try:
        yield (running := Worker(node, parts.engine, run, stop))
    finally:
        running.resume()
        stop.handle(signal.SIGINT)
        await asyncio.wait_for(run, PATIENCE_S)


@contextlib.asynccontextmanager
async def routed(prefill: Worker, decode: Worker) -> AsyncIterator[Router]:
    """A router's view of both, connected."""
    router = Router(prefill, decode, "router")
    await router.connect()
    try:
        yield router
    finally:
        await router.close()


@contextlib.asynccontextmanager
async def pair(*, prefill_blocks: int = 64, decode_blocks: int = 64) -> AsyncIterator[Router]:
    """A router's view of two fresh nodes. Both must be settled by the test itself."""
    async with (
        worker("prefill", make_engine(prefill_blocks)) as prefill,
        worker("decode", make_engine(decode_blocks)) as decode,
        routed(prefill, decode) as router,
    ):
        yield router
