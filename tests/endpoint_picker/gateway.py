"""A gateway as Envoy is one, with the messages of Envoy's own protocol files, and a picker before fake nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import grpc
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as Mode
from envoy_data_plane.envoy.service.ext_proc import v3
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.endpoint_picker.service import GrpcServer, HealthStates, processing_server
from kvferry.endpoint_picker.services import Services
from kvferry.model_files.model_name import ModelName
from kvferry.protocol.epp_settings import EppSettings
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.tenants.tenant_registry import TenantRegistry
from tests.api_parts import demo_text
from tests.fake_workers import BLOCK, FakeWorker
from tests.waiting import until

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
TEXT = "Once upon a time there was a small ferry between two islands. " * 8
DUPLEX = Mode.FULL_DUPLEX_STREAMED


def engine(node_id: str, host: str = "", *, events: bool = True, **changes: Any) -> FakeWorker:
    """A node that stands before an engine at 10.0.0.N, N from its name."""
    address = host or f"10.0.0.{node_id[1:]}"
    guarantees = ("kv_events",) if events else ()
    given = {"engine": "vllm 0.32.0", "engine_url": f"http://{address}:8000", "guarantees": guarantees, **changes}
    return FakeWorker(node_id, "decode", changes=given)


def at(node_id: str) -> str:
    return f"10.0.0.{node_id[1:]}:8000"


class House:
    """A picker on real gRPC, its nodes and their registry."""

    def __init__(self, *workers: FakeWorker, **settings: Any) -> None:
        self.workers = {worker.node_id: worker for worker in workers}
        self.settings = EppSettings(**{"queue_timeout": 0.3, "fallback_endpoints": 0, **settings})
        self.store, self.metrics = MemoryStore(lease_s=1e9), RouterMetrics()
        self.nodes = NodeTable(self.store, self.metrics, poll_s=0.02, grace_s=0.5)
        self.cluster = RouterCluster(
            self.store, self.store, self.metrics, nodes=self.nodes,
            client=NodeClient("epp-test", connect_s=2.0, silence_s=5.0),
            buddies=False, fetch=False, max_wait_s=self.settings.queue_timeout, lookup_s=5.0,
        )  # fmt: skip
        text = replace(demo_text(), called=ModelName("m"))
        self.tenants = TenantRegistry(self.settings)
        self.services = Services.of(self.settings, [text], self.cluster, self.metrics, self.tenants)
        self.picker = self.services.pickers["m"]
        self.states = HealthStates(self.services.trouble)
        self.server: GrpcServer = processing_server(self.services, self.states)

    async def announce(self, node_id: str, **changes: Any) -> None:
        worker = self.workers[node_id]
        worker.lease = replace(worker.lease, **changes)
        await self.store.announce(worker.lease)

    async def hold(self, node_id: str, token_ids: Sequence[int], namespace: str = "") -> None:
        """The node's engine reports these blocks."""
        hashes = chain(root_hash("fp", namespace), tuple(token_ids), BLOCK)
        await self.store.publish(node_id, 1, rows_of(hashes), ())

    def bookings(self) -> dict[str, int]:
        return {key[0]: len(entry.reservations) for key, entry in self.nodes.entries.items()}

    def free(self) -> bool:
        """Nothing is left of any request."""
        entries = self.nodes.entries.values()
        return not any(self.bookings().values()) and all(e.idle for e in entries) and not self.services.limit.count

    async def __aenter__(self) -> Self:
        for worker in self.workers.values():
            await worker.start()
            await self.store.announce(worker.lease)
        await self.cluster.open()
        await until(lambda: all(entry.open for entry in self.nodes.entries.values()))
        self.port = await self.server.start("127.0.0.1", 0, None, "port")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                await until(self.free)
        finally:
            await self.channel.close()
            await self.server.stop(0)
            await self.services.models.aclose()
            await self.cluster.close()
            for worker in self.workers.values():
                await worker.stop()

    def stream(self) -> Stream:
        call = self.channel.stream_stream(METHOD, bytes, v3.ProcessingResponse.parse)
        return Stream(call())

    async def ask(self, body: Any, path: str = "/v1/chat/completions", **head: Any) -> Answered:
        """Send a request and return what the picker says; the stream stays open."""
        stream = self.stream()
        await stream.head(path, **head)
        await stream.body(body if isinstance(body, bytes) else json.dumps(body).encode(), last=True)
        return await stream.answered()

    async def complete(self, body: Any, path: str = "/v1/chat/completions", **head: Any) -> str:
        """Send a request, answer it, and return the first endpoint that the picker named."""
        answered = await self.ask(body, path, **head)
        assert answered.endpoints, answered.error
        await answered.stream.respond(b'{"id": "x"}')
        return answered.endpoints[0]


@dataclass
class Answered:
    """What a picker answered: endpoints and the echoed body, or an error."""

    stream: Stream
    endpoints: list[str] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)
    body: bytes = b""
    parts: list[int] = field(default_factory=list)
    status: int = 0
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    clears_route: bool = False


class Stream:
    """One stream, which is one request of a gateway."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **message: Any) -> None:
        await self.call.write(v3.ProcessingRequest(**message))

    async def head(
        self,
        path: str = "/v1/chat/completions",
        *,
        headers: dict[str, str] | None = None,
        subset: Sequence[str] | str | None = None,
        last: bool = False,
        request_mode: Mode = DUPLEX,
        response_mode: Mode = DUPLEX,
    ) -> None:
        given = {":method": "POST", ":path": path, "content-type": "application/json", **(headers or {})}
        hint: dict[str, Struct] = {}
        if subset is not None:
            value = text(subset) if isinstance(subset, str) else Value(list_value=ListValue([*map(text, subset)]))
            hint = {"envoy.lb.subset_hint": Struct({f"{DESTINATION}-subset": value})}
        await self.send(
            request_headers=v3.HttpHeaders(header_map(given), end_of_stream=last),
            metadata_context=Metadata(filter_metadata=hint),
            protocol_config=v3.ProtocolConfiguration(request_mode, response_mode),
        )

    async def body(self, data: bytes, *, last: bool) -> None:
        await self.send(request_body=v3.HttpBody(data, end_of_stream=last))

    async def read(self) -> v3.ProcessingResponse:
        message = await self.call.read()
        assert message is not grpc.aio.EOF, await self.call.code()
        return message

    async def answered(self) -> Answered:
        """Read the whole answer to a request in full-duplex mode."""
        first, found = await self.read(), Answered(self)
        if refused(first, found):
            return found
        placed(first, first.request_headers.response, found)
        while True:
            message = await self.read()
            part = message.request_body.response.body_mutation.streamed_response
            found.body += part.body
            found.parts.append(len(part.body))
            if part.end_of_stream:
                return found

    async def respond(self, data: bytes = b"{}", *, status: int = 200, served: str = "") -> bytes:
        """Send a response in one part, and return it as it came back; the stream ends."""
        await self.begin(status, served)
        await self.send(response_body=v3.HttpBody(data, end_of_stream=True))
        got, ended = b"", False
        while not ended:
            part = (await self.read()).response_body.response.body_mutation.streamed_response
            got, ended = got + part.body, part.end_of_stream
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() is grpc.StatusCode.OK
        return got

    async def begin(self, status: int = 200, served: str = "") -> None:
        """Send a response's head and read its answer."""
        metadata = {"envoy.lb": Struct({f"{DESTINATION}-served": text(served)})} if served else {}
        await self.send(
            response_headers=v3.HttpHeaders(header_map({":status": str(status)})),
            metadata_context=Metadata(filter_metadata=metadata),
        )
        assert (await self.read()).response_headers is not None


def text(value: str) -> Value:
    return Value(string_value=value)


def header_map(headers: dict[str, str]) -> HeaderMap:
    return HeaderMap([HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


def refused(message: v3.ProcessingResponse, found: Answered) -> bool:
    """Whether the message is an error, which is then in `found`."""
    immediate = message.immediate_response
    if immediate is None:
        return False
    found.status, found.error = int(immediate.status.code), json.loads(immediate.body)["error"]
    found.headers = {each.header.key: each.header.raw_value.decode() for each in immediate.headers.set_headers}
    return True


def placed(message: v3.ProcessingResponse, common: v3.CommonResponse, found: Answered) -> None:
    """Take the endpoints from a message."""
    (option,) = common.header_mutation.set_headers
    assert option.header.key == DESTINATION
    found.endpoints = option.header.raw_value.decode().split(",")
    told = message.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION]
    found.metadata, found.clears_route = told.string_value.split(","), common.clear_route_cache


def chat(content: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, **fields}
