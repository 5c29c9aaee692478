"""Two routers of one cluster in one process, and clients whose connections break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from kvferry.cluster_state.journals import Journals
from kvferry.cluster_state.memory_journals import MemoryJournals
from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.sse import COMMENT
from kvferry.router.batch.batches import Batches
from kvferry.router.journal.request_journals import RequestJournals
from kvferry.router.text.text_model import TextModel
from tests.api_parts import FakeCluster, app_of, demo_text
from tests.memory_responses import MemoryResponses

LEASE_S = 0.8
_DEAD: list[contextlib.AsyncExitStack] = []
"""What killed routers would have done at their end; the garbage collector must not do it either."""
CHAT = "/v1/chat/completions"


class Shared:
    """What routers share: nodes, journals, leases and stored responses."""

    def __init__(self, cluster: FakeCluster, text: TextModel | None = None) -> None:
        self.cluster, self.text = cluster, text or demo_text()
        self.leases = MemoryRouterLeases(lease_s=LEASE_S)
        self.journals = MemoryJournals(self.leases)
        self.kept = MemoryResponses()


class Router:
    """One router process of the cluster; use it as a context manager, and `kill` it as SIGKILL would."""

    def __init__(self, shared: Shared, journals: Journals | None = None, **settings: Any) -> None:
        self.shared, self.metrics = shared, RouterMetrics()
        given = RouterSettings(**settings)
        self.ownership = RouterOwnership(shared.leases, period_s=LEASE_S / 6)
        self.journals = RequestJournals(given, self.ownership.owner, self.metrics.journals, journals or shared.journals)
        self.app = app_of(
            shared.cluster, shared.text, self.metrics, given, shared.kept, Batches(given), ownership=self.ownership,
            journals=self.journals,
        )  # fmt: skip
        self._stack = contextlib.AsyncExitStack()
        self.exchanges: list[Exchange] = []

    async def __aenter__(self) -> Router:
        before = asyncio.all_tasks()
        await self._stack.enter_async_context(self.journals.running())
        await self._stack.enter_async_context(self.ownership.running())
        self._tasks = asyncio.all_tasks() - before
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def kill(self) -> None:
        """End everything without a last word: nothing is written or given up, and the lease lapses."""
        for task in self._tasks:
            task.cancel()
        for exchange in self.exchanges:
            exchange.abandon()
        _DEAD.append(self._stack)
        self._stack = contextlib.AsyncExitStack()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Exchange:
        """Send a request."""
        return self._begun(Exchange("POST", path, json.dumps(body).encode(), headers))

    def get(self, path: str, **headers: str) -> Exchange:
        """Send a GET."""
        return self.send("GET", path, **headers)

    def send(self, method: str, path: str, **headers: str) -> Exchange:
        """Send a request without a body."""
        return self._begun(Exchange(method, path, b"", headers))

    def count(self, name: str, **labels: str) -> float:
        """Return a metric's value."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def _begun(self, exchange: Exchange) -> Exchange:
        exchange.begin(self.app)
        self.exchanges.append(exchange)
        return exchange


class Exchange:
    """One request and what came back so far: `data` without comments, and `comments`, their times."""

    def __init__(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        self.status, self.data, self._body = 0, b"", body
        self.comments: list[float] = []
        self.headers: dict[str, str] = {}
        self._left, self._over = asyncio.Event(), asyncio.Event()
        self._progress = asyncio.Condition()
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
            "server": ("router", 80), "client": ("127.0.0.1", 1),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip

    def begin(self, app: Callable[..., Any]) -> None:
        """Send the request."""
        self._task = asyncio.create_task(app(self._scope, self._receive, self._send))
        self._task.add_done_callback(lambda _: self._over.set())

    async def whole(self, within_s: float = 10.0) -> Exchange:
        """Wait for the end of the answer."""
        async with asyncio.timeout(within_s):
            await self._over.wait()
        if not self._task.cancelled():
            self._task.result()
        return self

    async def until(self, events: int, within_s: float = 10.0) -> Exchange:
        """Wait until so many events have come."""
        async with asyncio.timeout(within_s):
            while self.data.count(b"\n\n") < events:
                assert not self._over.is_set(), self.data
                await asyncio.sleep(0.002)
        return self

    async def leave(self) -> Exchange:
        """Close the connection, as a client does."""
        self._left.set()
        return await self.whole()

    def abandon(self) -> None:
        """End the request without a last word, as the death of its router does."""
        self._dead = True
        self._task.cancel()

    def cut(self, events: int) -> None:
        """Forget all but the first events, as if the connection had broken behind them."""
        self.data = b"".join(part + b"\n\n" for part in self.data.split(b"\n\n")[:events])

    @property
    def events(self) -> list[str]:
        """Return the whole events so far."""
        return self.data.decode().split("\n\n")[:-1]

    @property
    def last_id(self) -> str:
        """Return the id of the last event that has one."""
        return last_id(self.events)

    def json(self) -> Any:
        """Return the whole answer."""
        return json.loads(self.data)

    _dead = False

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None  # type: ignore[assignment]
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._dead or self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body") == COMMENT:
            self.comments.append(time.monotonic())
        else:
            self.data += message.get("body", b"")


def last_id(events: list[str]) -> str:
    """Return the id of the last event that has one."""
    ids = [line[4:] for event in events for line in event.splitlines() if line.startswith("id: ")]
    return ids[-1] if ids else ""


def values(events: list[str]) -> list[Any]:
    """Return the data of events that are JSON."""
    lines = [line[6:] for event in events for line in event.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(events: list[str]) -> dict[int, str]:
    """Return the text of each choice of a chat's or completion's events."""
    texts: dict[int, str] = {}
    for value in values(events):
        for choice in value.get("choices", []):
            said = choice.get("text") if "text" in choice else choice["delta"].get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (said or "")
    return texts
