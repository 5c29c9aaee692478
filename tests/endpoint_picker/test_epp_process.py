"""A picker as its process runs it: health, metrics, TLS, drains, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner
from envoy_data_plane.envoy.service.ext_proc import v3
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cli.main import kvferry
from kvferry.endpoint_picker.main import run_epp, serve_epp
from kvferry.protocol.epp_settings import NOT_FOR_EPP, EppSettings
from kvferry.protocol.errors import ConfigError
from kvferry.router.main import HURRY_S
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.signals import StopSignal
from tests.endpoint_picker.gateway import METHOD, Stream, at, chat, engine
from tests.fake_workers import Bench
from tests.worker.test_node_tls import certificate

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READY = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
ALL = (*READY, "liveness")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Process:
    """A picker on ports of the kernel's choice, its run, and a gateway's channels."""

    run: asyncio.Task[None]

    def __init__(self, bench: Bench, **settings: Any) -> None:
        ports = {name: free_port() for name in ("port", "health_port", "metrics_port")}
        self.settings = EppSettings(**{"served_model_name": ("m",), "drain_delay": 0.3, **ports, **settings})
        self.stop, self.bench = StopSignal(), bench
        self.credentials: Any = None
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.settings.port}")
        self.health = grpc.aio.insecure_channel(f"127.0.0.1:{self.settings.health_port}")

    async def states(self, channel: Any = None) -> dict[str, int]:
        stub = health_pb2_grpc.HealthStub(channel or self.health)
        return {
            name: (
                await stub.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True, timeout=20)
            ).status
            for name in ALL
        }

    def stream(self) -> Stream:
        return Stream(self.channel.stream_stream(METHOD, bytes, v3.ProcessingResponse.parse)())

    async def ask(self) -> Stream:
        """A request that was placed, its response outstanding."""
        stream = self.stream()
        await stream.head()
        await stream.body(json.dumps(chat()).encode(), last=True)
        assert (await stream.answered()).endpoints == [at("e1")]
        return stream

    async def ready(self) -> None:
        async with asyncio.timeout(20):
            while (await self.states())["readiness"] != SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def process(bench: Bench, **settings: Any) -> AsyncIterator[Process]:
    made = Process(bench, **settings)
    made.run = asyncio.create_task(run_epp(made.settings, ClusterSecrets(made.settings), bench.store, made.stop))
    try:
        await made.ready()
        yield made
    finally:
        made.stop.handle(signal.SIGINT)
        await made.run
        await made.channel.close()
        await made.health.close()


async def test_health_follows_the_registry() -> None:
    """Alive from the start, ready once Redis answered; both ports say so."""
    async with Bench([engine("e1")]) as bench:
        bench.store.available = False
        made = Process(bench)
        run = asyncio.create_task(run_epp(made.settings, ClusterSecrets(made.settings), bench.store, made.stop))
        assert await made.states() == {**dict.fromkeys(READY, NOT_SERVING), "liveness": SERVING}
        bench.store.available = True
        await made.ready()
        for channel in (made.health, made.channel):
            assert await made.states(channel) == dict.fromkeys(ALL, SERVING)
        made.stop.handle(signal.SIGINT)
        await run


async def test_a_request_goes_through_and_is_counted() -> None:
    async with Bench([engine("e1")]) as bench, process(bench) as made:
        await (await made.ask()).respond()
        url = f"http://127.0.0.1:{made.settings.metrics_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            text = (await client.get("/metrics")).text
            assert 'kvferry_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
            assert (await client.get("/ready")).status_code == 200
            assert (await client.get("/health")).json() == {"status": "ok"}


async def test_sigterm_says_so_first_then_lets_requests_finish() -> None:
    async with Bench([engine("e1")]) as bench, process(bench, drain_delay=0.6) as made:
        running = await made.ask()
        await running.begin()
        made.stop.handle(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert await made.states() == {**dict.fromkeys(READY, NOT_SERVING), "liveness": SERVING}
        late = await made.ask()  # from a gateway that did not hear of it yet
        await asyncio.sleep(0.8)
        refused = made.stream()
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(refused.answered(), 5)
        assert (await made.states())["liveness"] == SERVING
        assert not made.run.done()
        for stream in (running, late):
            await stream.send(response_trailers=v3.HttpTrailers())
            await stream.read()
        await asyncio.wait_for(asyncio.shield(made.run), 5)


async def test_a_second_signal_ends_it() -> None:
    async with Bench([engine("e1")]) as bench, process(bench, drain_delay=60.0) as made:
        await made.ask()
        made.stop.handle(signal.SIGTERM)
        made.stop.handle(signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(made.run), HURRY_S + 5)


async def test_tls_is_for_gateways_alone(tmp_path: Path) -> None:
    """Probes of Kubernetes speak no TLS."""
    files = certificate(tmp_path / "tls", "DNS:localhost")
    root = await asyncio.to_thread(Path(files["ssl_certfile"]).read_bytes)
    async with Bench([engine("e1")]) as bench, process(bench, **files) as made:
        target = f"localhost:{made.settings.port}"
        async with grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(root)) as made.channel:
            await (await made.ask()).respond()
        async with grpc.aio.insecure_channel(target) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest(), timeout=3)


@pytest.mark.parametrize("name", ["port", "health_port", "metrics_port"])
async def test_a_port_that_is_taken_is_named(name: str) -> None:
    async with Bench([]) as bench:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports = {"port": 0, "health_port": 0, "metrics_port": 0, name: taken.getsockname()[1]}
            settings = EppSettings(served_model_name=("m",), **ports)
            with pytest.raises(ConfigError, match=f"cannot listen on .*:{ports[name]}"):
                await run_epp(settings, ClusterSecrets(settings), bench.store, StopSignal())


async def test_files_of_a_certificate_must_be_readable(tmp_path: Path) -> None:
    async with Bench([]) as bench:
        settings = EppSettings(served_model_name=("m",), port=0, ssl_certfile=str(tmp_path / "none.pem"))
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            await run_epp(settings, ClusterSecrets(settings), bench.store, StopSignal())


@pytest.mark.parametrize("missing", ["grpc", "grpc_health", "google.protobuf"])
async def test_a_missing_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvferry.endpoint_picker.")]:
        if name.rpartition(".")[2] in ("service", "ext_proc", "exchange", "replies", "request_head"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("kvferry.endpoint_picker.service", raising=False)
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    async with Bench([]) as bench:
        settings = EppSettings(served_model_name=("m",))
        with pytest.raises(ConfigError, match=r"pip install 'kvferry\[epp\]'"):
            await run_epp(settings, ClusterSecrets(settings), bench.store, StopSignal())


def test_the_command_has_the_flags_of_placement_alone() -> None:
    told = CliRunner().invoke(kvferry, ["epp", "--help"]).output
    for name in ("--fallback-endpoints", "--health-port", "--api-keys", "--queue-timeout", "--chat-template"):
        assert name in told
    for name in NOT_FOR_EPP:
        assert f"--{name.replace('_', '-')} " not in told
    assert EppSettings().port == 9002
    assert serve_epp.__doc__
