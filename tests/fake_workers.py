"""Workers with the real HTTP API and a model made of arithmetic, in the test's own loop; a router cluster on them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

import uvicorn
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as HttpRoute

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.model_files.model_name import ModelName
from kvferry.protocol.adapters import AdapterName, ChangeAdapter
from kvferry.protocol.errors import KvferryError, StreamLost, TransferFailed
from kvferry.protocol.lease import Load, NodeLease
from kvferry.protocol.media import Encoded, EncodeRequest, RenderRequest, joined, with_data, without_data
from kvferry.protocol.messages import (
    AttemptFailed,
    CancelRequest,
    FirstToken,
    GenerateRequest,
    Job,
    MoveRequest,
    PrefillRequest,
    Pulse,
    ShipDone,
    StepFrame,
    TokenDelta,
)
from kvferry.protocol.prefix_reuse import Missed, Reuse
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.sessions import SessionNotes
from kvferry.protocol.wire import FrameReader, pack, unpack
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.canary_release import CanaryRelease
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.dispatch import RequestDispatch
from kvferry.router.dispatch.interface import Output, RequestSpec
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.request_context import RequestContext
from tests.waiting import until

BLOCK = 4
PROMPT = tuple(range(100, 164))
CRASH = "crash"
SILENCE = "silence"
DEADLY = 666
Answer = AsyncIterator[Any]
FAIL_S = 0.1
"""From a prefill's first token to a decode node's report that its blocks did not come: the token is out by then."""


def next_token(tokens: Sequence[int]) -> int:
    return (tokens[-1] * 31 + len(tokens) * 7 + 3) % 997


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def lease_of(node_id: str, role: str, epoch: int = 1, **changes: Any) -> NodeLease:
    lease = NodeLease(
        node_id, role, epoch, "ready", "http://127.0.0.1:9", "127.0.0.1:9", "fp", "m", 4096, BLOCK, 1000,
        Load(free_blocks=1000, total_blocks=1000),
    )  # fmt: skip
    return replace(lease, **changes)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@dataclass
class FakeWorker:
    """`prefill_script(worker, request)` yields the answer's messages, or CRASH (the process dies), or SILENCE (it
    hangs). A decode node crashes after `crash_after` deltas, and answers attempts with `refusal` if there is one. A
    prompt that begins with the token DEADLY crashes anyone who runs it, a decode node after a moment. Streams are
    handed over after `move_wait_s`, which is told `move_lag_s` later, unless `move_refusals` has an answer. Prompts
    with media are answered with the first of `prompts`: a message, an error or CRASH. Requests to encode are answered
    with the first of `encodings`, which may be SILENCE, too, or as asked."""

    node_id: str
    role: str
    epoch: int = 1
    step_s: float = 0.003
    peers: dict[str, FakeWorker] = field(default_factory=dict)
    prefill_script: Callable[[FakeWorker, PrefillRequest], Answer] | None = None
    crash_after: int | None = None
    refusal: KvferryError | None = None
    fail_attempts: list[str] = field(default_factory=list)
    frozen: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    prefills: list[PrefillRequest] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    cancels: list[CancelRequest] = field(default_factory=list)
    notes: list[SessionNotes] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    moves: list[MoveRequest] = field(default_factory=list)
    move_refusals: list[KvferryError] = field(default_factory=list)
    move_wait_s: float = 0.0
    move_lag_s: float = 0.0
    pulse: Pulse | None = None
    store: MemoryStore | None = None
    prompts: list[Any] = field(default_factory=list)
    rendered: list[RenderRequest] = field(default_factory=list)
    render_s: float = 0.0
    encodings: list[Any] = field(default_factory=list)
    encoded: list[EncodeRequest] = field(default_factory=list)

    async def start(self) -> None:
        self._queues: dict[str, asyncio.Queue[StepFrame | None]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._dropped: dict[str, int] = {}
        self._made: dict[str, int] = {}
        self._deltas = 0
        self._open = 0
        routes = [
            HttpRoute("/attempts/prefill", self._prefill, methods=["POST"]),
            HttpRoute("/attempts/generate", self._generate, methods=["POST"]),
            HttpRoute("/attempts/cancel", self._cancel, methods=["POST"]),
            HttpRoute("/sessions", self._sessions, methods=["POST"]),
            HttpRoute("/attempts/render", self._render, methods=["POST"]),
            HttpRoute("/attempts/encode", self._encode, methods=["POST"]),
            HttpRoute("/attempts/move", self._move, methods=["POST"]),
            HttpRoute("/adapters", self._change_adapter, methods=["POST"]),
            HttpRoute("/streams/{router}", self._stream),
            HttpRoute("/streams/{router}/seen", self._seen, methods=["POST"]),
        ]
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.lease = lease_of(self.node_id, self.role, self.epoch, http_url=url, **self.changes)
        config = uvicorn.Config(Starlette(routes=routes), lifespan="off", log_level="critical", access_log=False)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def crash(self) -> None:
        """As seen from outside: every connection is reset and the port refuses."""
        for task in self._running.values():
            task.cancel()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for server in self._server.servers:
            server.close()
        self._socket.close()
        self._server.should_exit = self._server.force_exit = True

    async def stop(self) -> None:
        self.crash()
        await asyncio.wait([self._task], timeout=5)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def answering(self) -> int:
        """Prefill answers under way."""
        return self._open

    def decode(self, job: Job, first_index: int, reuse: Reuse | None = None) -> None:
        """Generate output tokens from `first_index` (0 = first of the whole request) on."""
        self.jobs.append(job)
        if job.attempt <= self._dropped.get(job.request_id, -1) or job.router_id not in self._queues:
            return
        if known := self._running.get(job.request_id):
            known.cancel()
        task = asyncio.create_task(self._run(job, first_index, reuse), name=str(job.attempt))
        self._running[job.request_id] = task
        task.add_done_callback(lambda done: self._forget(job.request_id, done))

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(request_id) is task:
            del self._running[request_id]

    async def _run(self, job: Job, index: int, reuse: Reuse | None) -> None:
        queue = self._queues[job.router_id]
        if self.fail_attempts:
            code = self.fail_attempts.pop(0)
            await asyncio.sleep(FAIL_S)
            queue.put_nowait(StepFrame(failed=(AttemptFailed(job.request_id, job.attempt, code, "scripted"),)))
            return
        if job.token_ids[0] == DEADLY:
            await asyncio.sleep(FAIL_S)
            self.crash()
            return
        tokens = list(job.token_ids) + expected(job.token_ids, index - (len(job.token_ids) - job.prompt_len))
        while index < job.params.max_tokens:
            await asyncio.sleep(self.step_s)
            tokens.append(next_token(tokens))
            reason = "length" if index + 1 == job.params.max_tokens else None
            delta = TokenDelta(job.request_id, job.attempt, index, (tokens[-1],), finish_reason=reason, reuse=reuse)
            queue.put_nowait(StepFrame((delta,)))
            index, reuse = index + 1, None
            self._made[job.request_id] = index
            self._deltas += 1
            if self.crash_after is not None and self._deltas >= self.crash_after:
                await asyncio.sleep(self.step_s)
                self.crash()
                return

    async def _prefill(self, request: Request) -> Response:
        message, *datas = FrameReader().feed(await request.body())
        assert isinstance(message, PrefillRequest)
        message = replace(message, job=replace(message.job, media=joined(message.job.media, datas)))
        self.prefills.append(message)
        if self.refusal:
            return _error(self.refusal)
        script = self.prefill_script or honest_prefill

        async def body() -> AsyncIterator[bytes]:
            self._open += 1
            try:
                async for answer in script(self, message):
                    if answer == CRASH:
                        self.crash()
                        return
                    if answer == SILENCE:
                        await asyncio.sleep(60)
                    yield pack(answer)
            finally:
                self._open -= 1

        return StreamingResponse(body(), media_type="application/msgpack")

    async def _generate(self, request: Request) -> Response:
        message, *datas = FrameReader().feed(await request.body())
        assert isinstance(message, GenerateRequest)
        if self.refusal:
            return _error(self.refusal)
        job = replace(message.job, media=joined(message.job.media, datas))
        total = len(job.token_ids)
        reused = min(8, total - 1)
        self.decode(job, total - job.prompt_len, Reuse(total, 0, reused, 0, total - reused, evicted(job, reused)))
        return Response(status_code=202)

    async def _sessions(self, request: Request) -> Response:
        self.notes.append(unpack(await request.body()))
        return Response(status_code=202)

    async def _cancel(self, request: Request) -> Response:
        message = unpack(await request.body())
        assert isinstance(message, CancelRequest)
        self.cancels.append(message)
        self._dropped[message.request_id] = max(message.attempt, self._dropped.get(message.request_id, -1))
        task = self._running.get(message.request_id)
        if task and int(task.get_name()) <= message.attempt:
            task.cancel()
        return Response(status_code=202)

    async def _render(self, request: Request) -> Response:
        message, *files = FrameReader().feed(await request.body())
        assert isinstance(message, RenderRequest)
        self.rendered.append(replace(message, files=tuple(files)))
        answer = self.prompts.pop(0)
        await asyncio.sleep(self.render_s)
        if answer == CRASH:
            self.crash()
        if answer == SILENCE:
            await asyncio.sleep(60)
        if isinstance(answer, KvferryError):
            return _error(answer)
        media = getattr(answer, "media", ())
        message = pack(replace(answer, media=without_data(media)) if media else answer)
        return Response(b"".join(with_data(message, media)))

    async def _encode(self, request: Request) -> Response:
        message, *datas = FrameReader().feed(await request.body())
        assert isinstance(message, EncodeRequest)
        self.encoded.append(replace(message, media=joined(message.media, datas)))
        answer = self.encodings.pop(0) if self.encodings else Encoded(len(message.media))
        if answer == CRASH:
            self.crash()
        if answer == SILENCE:
            await asyncio.sleep(60)
        return _error(answer) if isinstance(answer, KvferryError) else Response(pack(answer))

    async def _move(self, request: Request) -> Response:
        message = unpack(await request.body())
        assert isinstance(message, MoveRequest)
        self.moves.append(message)
        await asyncio.sleep(self.move_wait_s)
        if self.move_refusals:
            return _error(self.move_refusals.pop(0))
        task = self._running.get(message.request_id)
        if task is None:
            return _error(TransferFailed("it does not stream here"))
        task.cancel()
        job, made = (
            next(job for job in self.jobs if job.request_id == message.request_id),
            self._made[message.request_id],
        )
        self.peers[message.target.node_id].decode(replace(job, attempt=message.later), made)
        await asyncio.sleep(self.move_lag_s)
        moved = AttemptFailed(message.request_id, message.attempt, "moved", "scripted", message.later)
        self._queues[job.router_id].put_nowait(StepFrame(failed=(moved,)))
        return Response(status_code=202)

    async def _change_adapter(self, request: Request) -> Response:
        """As the node's lease tells it at once."""
        change = unpack(await request.body())
        assert isinstance(change, ChangeAdapter)
        if self.refusal and change.path:
            return _error(self.refusal)
        others = tuple(each for each in self.lease.adapters if each.name != change.name)
        added = (AdapterName(change.name, f"id of {change.path}"),) if change.path else ()
        self.lease = replace(self.lease, adapters=others + added)
        assert self.store is not None
        await self.store.announce(self.lease)
        return Response(status_code=202)

    async def _seen(self, request: Request) -> Response:
        self.seen.append(unpack(await request.body()).number)
        return Response(status_code=202)

    async def _stream(self, request: Request) -> Response:
        """Nothing is kept: a stream that broke cannot go on."""
        if self.frozen:
            await asyncio.sleep(60)
        if "after" in request.query_params:
            return _error(StreamLost("scripted"))
        queue: asyncio.Queue[StepFrame | None] = asyncio.Queue()
        self._queues[request.path_params["router"]] = queue

        async def body() -> AsyncIterator[bytes]:
            yield pack(StepFrame())
            while True:
                try:
                    async with asyncio.timeout(0.2):
                        frame = await queue.get()
                except TimeoutError:
                    frame = StepFrame(pulse=self.pulse)
                if frame is None:
                    return
                if self.frozen:
                    await asyncio.sleep(60)
                yield pack(frame)

        return StreamingResponse(body(), media_type="application/msgpack")

    def close_streams(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(None)


def _error(error: KvferryError) -> Response:
    return JSONResponse(error.body(), error.status)


def evicted(job: Job, reused: int) -> Missed:
    """Of a node that dropped all that was predicted beyond what it reused."""
    return (("evicted", job.predicted[0] - reused),) if job.predicted[0] > reused else ()


def first_token(job: Job, reused: int = 16) -> FirstToken:
    total = len(job.token_ids)
    reused = min(reused, total - 1)
    reason = "length" if job.params.max_tokens == total - job.prompt_len + 1 else None
    token = next_token(job.token_ids)
    reuse = Reuse(total, reused, 0, 0, total - reused, evicted(job, reused))
    delta = TokenDelta(job.request_id, job.attempt, total - job.prompt_len, (token,), None, reason, None, reuse)
    return FirstToken(delta, 0.001, 0.002)


def ship_done(job: Job) -> ShipDone:
    return ShipDone(job.request_id, job.attempt, 16, 16000, 0.001, 0.0)


async def honest_prefill(worker: FakeWorker, request: PrefillRequest) -> Answer:
    first = first_token(request.job)
    yield first
    if request.target and first.delta.finish_reason is None:
        worker.peers[request.target.node_id].decode(request.job, first.delta.index + 1)
        yield ship_done(request.job)


class Bench:
    """Fake workers, a registry they are announced in, and the router's cluster of their model under test."""

    def __init__(
        self,
        workers: Sequence[FakeWorker],
        max_wait_s: float = 1.0,
        silence_s: float = 3.0,
        model: ModelName = ModelName("m"),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        buddies: bool = True,
        fetch: bool = True,
        canary: CanaryRelease | None = None,
    ) -> None:
        self.workers = {worker.node_id: worker for worker in workers}
        self.store = MemoryStore(lease_s=1e9)
        self.metrics = RouterMetrics()
        self.nodes = NodeTable(self.store, self.metrics, poll_s=0.02, grace_s=0.3)
        self.client = NodeClient("router-test", connect_s=0.5, silence_s=silence_s, clock=clock)
        self.all = RouterCluster(
            self.store,
            self.store,
            self.metrics,
            nodes=self.nodes,
            client=self.client,
            max_wait_s=max_wait_s,
            buddies=buddies,
            fetch=fetch,
            canary=canary,
        )
        self.cluster = self.all.pool(model)

    def __getitem__(self, node_id: str) -> FakeWorker:
        return self.workers[node_id]

    async def add(self, worker: FakeWorker) -> None:
        self.workers[worker.node_id] = worker
        for other in self.workers.values():
            other.peers = self.workers
        await worker.start()
        worker.store = self.store
        await self.store.announce(worker.lease)

    async def __aenter__(self) -> Self:
        for worker in list(self.workers.values()):
            await self.add(worker)
        await self.all.open()
        await until(lambda: all(entry.open for entry in self.nodes.entries.values()))
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                await until(self.balanced)
        finally:
            await self.all.close()
            for worker in self.workers.values():
                await worker.stop()

    def balanced(self) -> bool:
        """No booking, no listener, no errand is left."""
        return all(entry.idle for entry in self.nodes.entries.values()) and not self.cluster.background_calls.open

    def start(
        self, max_tokens: int = 8, prompt: Sequence[int] = PROMPT, *, deadline_s: float = 600.0, first_s: float = inf,
        itl_s: float = inf, patient: bool = False, **spec: Any,
    ) -> RequestDispatch:  # fmt: skip
        params = SamplingParams(max_tokens=max_tokens, **spec.pop("params", {}))
        now = time.monotonic()
        call = RequestContext(
            "r", arrival=now, deadline=now + deadline_s, first_by=now + first_s, itl_s=itl_s, is_background=patient
        )
        return self.cluster.start(RequestSpec(call, "r", tuple(prompt), Generate(params), **spec))

    def retries(self) -> dict[str, int]:
        return self._counted(self.metrics.retries, "step")

    def placements(self) -> dict[str, int]:
        return self._counted(self.metrics.placements, "kind")

    @staticmethod
    def _counted(counter: Counter, label: str) -> dict[str, int]:
        (family,) = counter.collect()
        return {s.labels[label]: int(s.value) for s in family.samples if s.name.endswith("_total") and s.value}


def ids(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def collect(dispatch: RequestDispatch) -> list[Output]:
    """All outputs, as the API takes them: most are heard, the others iterated."""
    outputs: list[Output] = []
    dispatch.listen(outputs.append)
    async for output in dispatch:
        outputs.append(output)
    return outputs


def prefill(node_id: str = "p1", **fields: Any) -> FakeWorker:
    return FakeWorker(node_id, "prefill", **fields)


def decode(node_id: str = "d1", **fields: Any) -> FakeWorker:
    return FakeWorker(node_id, "decode", **fields)


def encode(node_id: str = "e1", **fields: Any) -> FakeWorker:
    changes = {"modalities": ("image",), **fields.pop("changes", {})}
    return FakeWorker(node_id, "encode", changes=changes, **fields)
