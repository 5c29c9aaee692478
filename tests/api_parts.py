"""What the API's tests stand on: the demo model's text side, a cluster that answers from a script, an HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import fastapi.routing
import httpx
import uvicorn
from fastapi.utils import create_model_field
from starlette.types import ASGIApp

from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.responses import ResponseStore
from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.cluster_state.seal import NO_SEAL
from kvferry.placement.capacity import Capacity
from kvferry.protocol.adapters import ChangeAdapter
from kvferry.protocol.errors import InvalidRequest, KvferryError
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.media import RenderRequest
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.protocol.speech import SpeechPart, SpeechRequest
from kvferry.protocol.work import Generate, Grammar
from kvferry.router.api.app import create_app
from kvferry.router.api.served_models import ServedModels, pool_of
from kvferry.router.batch.batches import Batches
from kvferry.router.batch.redis_store import cluster_files
from kvferry.router.dashboard.snapshot import SnapshotBuilder
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.interface import Cluster, ClusterInfo, Fork, Output, OutputComplete, RequestSpec, Route
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.dispatch.prompt_media import RenderedMedia
from kvferry.router.journal.request_journals import RequestJournals
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.router.text.loader import load_text_model
from kvferry.router.text.text_model import TextModel
from kvferry.runtime.rejection_throttle import RejectionThrottle
from tests.memory_responses import MemoryResponses
from tests.shared_verdicts import share_verdicts

EOS = 2
Script = Callable[[RequestSpec], Sequence[Output | KvferryError]]
fastapi.routing.create_model_field = cache(create_model_field)  # type: ignore[attr-defined]
"""What FastAPI makes of the types of answers: once a process, not again for the application of each
test, of which it takes a quarter."""


@cache
def demo_text() -> TextModel:
    return load_text_model(RouterSettings())


def ids_of(text: str) -> list[int]:
    return demo_text().encode(text, add_special_tokens=False)


class FakeDispatch:
    def __init__(self, spec: RequestSpec, outputs: Sequence[Output | KvferryError], route: Route, gap_s: float):
        self.spec = spec
        self.route: Route | None = None
        self.fork: Fork | None = None
        self.cancelled = asyncio.Event()
        self.complete, self.called_tools = False, set[str]()
        self.yielded = self.heard = 0
        self._listener: Callable[[Output], None] | None = None
        self._outputs, self._route, self._gap_s = outputs, route, gap_s

    async def __aiter__(self) -> AsyncGenerator[Output]:
        for output in self._outputs:
            await asyncio.sleep(self._gap_s)
            if self.cancelled.is_set():
                return
            if isinstance(output, KvferryError):
                raise output
            self.route, self.fork = self._route, Fork(self.spec.request_id, None)
            self.yielded += 1
            if self._listener is None or self.yielded == 1 or output.finish_reason is not None:
                yield output
            else:
                self.heard += 1
                try:
                    self._listener(output)
                except OutputComplete:
                    return

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        self._listener = listener

    def calls_tools(self, names: Collection[str]) -> None:
        self.called_tools = set(names)

    async def cancel(self, *, complete: bool = False) -> None:
        self.complete = complete
        self.cancelled.set()


class FakeAdapters:
    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        self.changes: list[ChangeAdapter] = []

    async def change(self, change: ChangeAdapter) -> None:
        self.changes.append(change)
        if change.path:
            self.ids[change.name] = f"id of {change.path}"
        else:
            del self.ids[change.name]


class FakeMedia:
    """Media that nodes take: `takes`; prompts come from `answers`, one a request."""

    def __init__(self) -> None:
        self.takes: tuple[str, ...] = ()
        self.answers: list[RenderedMedia | KvferryError] = []
        self.asked: list[RenderRequest] = []
        self.speech: list[SpeechPart | KvferryError] = []
        self.heard: list[SpeechRequest] = []

    def check(self, modalities: Collection[str], adapter: str = "") -> None:
        if missing := sorted(set(modalities) - set(self.takes)):
            raise InvalidRequest(f"no node of the model takes {missing[0]} in a prompt")

    def modalities(self, adapter: str = "") -> frozenset[str]:
        return frozenset(self.takes)

    async def render(self, request: RenderRequest, modalities: Collection[str]) -> RenderedMedia:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, KvferryError):
            raise answer
        return answer

    async def transcribe(self, request: SpeechRequest, deliver: Callable[[SpeechPart], None]) -> None:
        self.heard.append(request)
        for part in self.speech:
            if isinstance(part, KvferryError):
                raise part
            deliver(part)
            await asyncio.sleep(0)


class FakeCluster:
    """Answers every spec with what `script` says; remembers the dispatches."""

    def __init__(self, script: Script, *, gap_s: float = 0.0, max_model_len: int = 4096, cached: int = 0) -> None:
        self.script, self.gap_s, self.cached = script, gap_s, cached
        self.max_model_len = max_model_len
        self.dispatches: list[FakeDispatch] = []
        self.adapters, self.media = FakeAdapters(), FakeMedia()
        self.refusal: KvferryError | None = None
        self.is_ready, self.lacks = True, ""
        self.nodes: list[NodeLease] = []
        self.takes = Capacity()
        self.held = PendingRequests()
        self.closed: list[str] = []

    def info(self) -> ClusterInfo:
        return ClusterInfo("demo", self.max_model_len)

    def capacity(self) -> Capacity:
        return self.takes

    def close_session(self, session: str) -> None:
        self.closed.append(session)

    def leases(self) -> list[NodeLease]:
        return self.nodes

    def trouble(self) -> str:
        return self.lacks

    def ready(self) -> dict[str, int]:
        return {"prefill": 0, "decode": int(self.is_ready)}

    def start(self, spec: RequestSpec) -> FakeDispatch:
        if self.refusal is not None:
            raise self.refusal
        prompt_len = len(spec.token_ids)
        cached = min(self.cached, prompt_len)
        route = Route("p0", "d0", Reuse(prompt_len, reused_prefill=cached, computed=prompt_len - cached))
        dispatch = FakeDispatch(spec, self.script(spec), route, self.gap_s)
        self.dispatches.append(dispatch)
        return dispatch

    @property
    def grammar(self) -> Grammar | None:
        """Of the last dispatch."""
        work = self.dispatches[-1].spec.work
        assert isinstance(work, Generate)
        return work.grammar


def says(text: str, *, finish: str = "stop", per_output: int = 1) -> Script:
    """A script that answers `text` to everyone, `per_output` tokens at a time, within max_tokens."""
    return lambda spec: outputs_for(spec, ids_of(text), finish=finish, per_output=per_output)


def outputs_for(
    spec: RequestSpec, token_ids: Sequence[int], *, finish: str = "stop", per_output: int = 1
) -> list[Output]:
    """Outputs a node would send: cut at max_tokens, ended by the end-of-sequence token unless `finish` is length. Work
    that generates nothing gets a vector of one number."""
    if not isinstance(spec.work, Generate):
        return [Output((), finish_reason="stop", vector=struct.pack("<f", 1.0))]
    ids = list(token_ids) if finish == "length" else [*token_ids, EOS]
    if len(ids) > spec.params.max_tokens:
        ids, finish = ids[: spec.params.max_tokens], "length"
    outputs = []
    for start in range(len(spec.delivered.token_ids) if spec.delivered else 0, len(ids), per_output):
        part = tuple(ids[start : start + per_output])
        last = start + per_output >= len(ids)
        outputs.append(
            Output(
                part,
                logprobs=logprobs_of(part, spec.params.logprobs),
                finish_reason=finish if last else None,
                stop_token=EOS if last and finish != "length" else None,
                prompt_logprobs=prompt_logprobs_of(spec) if start == 0 else None,
            )
        )
    return outputs


def logprob_of(token_id: int) -> float:
    """A made-up log-probability that tells tokens apart."""
    return -1.0 - token_id / 100_000


def logprobs_of(ids: Sequence[int], top: int | None) -> tuple[TokenLogprobs, ...] | None:
    if top is None:
        return None
    likely = tuple((100 + i, -0.1 - i) for i in range(top))
    return tuple(TokenLogprobs(token_id, logprob_of(token_id), 7, likely) for token_id in ids)


def prompt_logprobs_of(spec: RequestSpec) -> tuple[TokenLogprobs | None, ...] | None:
    found = logprobs_of(spec.token_ids[1:], spec.params.prompt_logprobs)
    return None if found is None else (None, *found)


def app_of(
    cluster: Cluster,
    text: TextModel,
    metrics: RouterMetrics,
    settings: RouterSettings | None = None,
    kept: ResponseStore | None = None,
    batches: Batches | None = None,
    board: SnapshotBuilder | None = None,
    throttle: RejectionThrottle | None = None,
    ownership: RouterOwnership | None = None,
    journals: RequestJournals | None = None,
) -> ASGIApp:
    """A single model, served by this cluster."""
    settings = settings or RouterSettings()
    tenant_registry = TenantRegistry(settings)
    pools = ServedModels(pool_of(text, cluster, metrics, settings, tenant_registry))
    share_verdicts(pools.first.checker, text)
    board = board or unwatched(metrics)
    return create_app(
        settings, pools, metrics, tenant_registry, kept, batches, board, None, throttle, ownership, journals
    )


def unwatched(metrics: RouterMetrics) -> SnapshotBuilder:
    """Of a cluster without nodes."""
    return SnapshotBuilder(RouterCluster(MemoryStore(), MemoryStore(), metrics), metrics)


class Api:
    """An application over a fake cluster and a client that talks to it in process."""

    def __init__(
        self,
        cluster: FakeCluster,
        text: TextModel | None = None,
        throttle: RejectionThrottle | None = None,
        owned: RouterOwnership | None = None,
        **settings: Any,
    ) -> None:
        self.cluster = cluster
        self.metrics = RouterMetrics()
        self.settings = RouterSettings(**settings)
        self.batches = Batches(self.settings, cluster_files(self.settings, NO_SEAL), owned, self.metrics.batches)
        self.kept = MemoryResponses()
        text = text or demo_text()
        ownership = owned or RouterOwnership(MemoryRouterLeases(), is_shared=False)
        self.journals = RequestJournals(self.settings, ownership.owner, self.metrics.journals, None)
        self.app = app_of(
            cluster, text, self.metrics, self.settings, self.kept, self.batches, throttle=throttle,
            ownership=ownership, journals=self.journals,
        )  # fmt: skip
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://router")

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "Once upon", **body})

    def sample(self, name: str, **labels: str) -> float:
        """Sum over all samples with at least these labels."""
        families = self.metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


MESSAGES = [{"role": "user", "content": "Hello"}]


def events(response: httpx.Response) -> list[Any]:
    """Data of a stream's events; "[DONE]" as text."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts), parts
    datas = [part.removeprefix("data: ") for part in parts]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Events of a stream, each under its type's name."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked for its shape."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return dict(error)


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """The application behind a real socket on a port of the kernel's choice; yields its base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(5)
        assert not thread.is_alive()
