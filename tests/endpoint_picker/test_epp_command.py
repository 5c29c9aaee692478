"""The command itself: a process of its own with a real Valkey server, from its start to its end by SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from envoy_data_plane.envoy.service.ext_proc import v3
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cli.health import url_of
from kvferry.cli.main import kvferry
from kvferry.cluster_state.redis_store import RedisStore
from tests.endpoint_picker.gateway import METHOD, Stream, at, chat, engine
from tests.redis_servers import RedisServer, free_ports


@pytest.mark.slow
async def test_the_command_places_requests_and_ends_in_order() -> None:
    (redis_port,) = free_ports(1)
    port, health_port, metrics_port = free_ports(3)
    server = RedisServer(redis_port)
    store, worker = RedisStore(server.url, "default", lease_s=60.0), engine("e1")
    await worker.start()
    await store.announce(worker.lease)
    argv = ["epp", "--served-model-name=m", f"--redis-url={server.url}", f"--port={port}", "--drain-delay=0.2"]
    argv += [f"--health-port={health_port}", f"--metrics-port={metrics_port}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.cli.main", *argv, cwd=Path(__file__).parents[2], stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
            stub, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="readiness")
            while (await stub.Check(asked, wait_for_ready=True)).status != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with asyncio.timeout(30), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(20):
                stream = Stream(channel.stream_stream(METHOD, bytes, v3.ProcessingResponse.parse)())
                await stream.head()
                await stream.body(json.dumps(chat()).encode(), last=True)
                assert (await stream.answered()).endpoints == [at("e1")]
                await stream.respond()
        url = url_of(kvferry, [*argv, "--ssl-certfile=x.pem"])
        assert url == f"http://127.0.0.1:{metrics_port}"
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/ready")).status_code == 200
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            _, told = await process.communicate()
        assert process.returncode == 0, told.decode()
        assert b"Traceback" not in told, told.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await store.close()
        await worker.stop()
        server.kill()
