"""The router's connections as clients hold them: kept, closed, of HTTP/1.0, and over TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.router.main import connection_limits, run_router
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.http import bind
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.tls import load, server_tls
from tests.fake_workers import Bench, decode, prefill
from tests.router.test_router_process import BODY, router
from tests.waiting import until, until_told


async def spoken(port: int, sent: bytes, answers: int, context: ssl.SSLContext | None = None) -> list[str]:
    """Heads of so many answers to these bytes, in lower case; then the connection must be closed or be open still."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(sent)
    heads = []
    for _ in range(answers):
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode().lower()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length"))
        await reader.readexactly(length)
        heads.append(head)
    try:
        rest = await asyncio.wait_for(reader.read(1), 0.3)
        heads.append("closed" if rest == b"" else "more")
    except TimeoutError:
        heads.append("open")
    writer.close()
    return heads


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with Bench([prefill(), decode()]) as bench, router(bench, StopSignal()) as (client, _):
        assert client.base_url.port
        yield client.base_url.port


async def test_a_connection_is_kept_unless_one_side_closes_it(port: int) -> None:
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    *heads, end = await spoken(port, (get + b"\r\n") * 2, 2)
    assert (len(heads), end) == (2, "open")
    assert not any("connection: close" in head for head in heads)
    head, end = await spoken(port, get + b"connection: close\r\n\r\n", 1)
    assert ("connection: close" in head, end) == (True, "closed")
    head, end = await spoken(port, b"GET /health HTTP/1.0\r\n\r\n", 1)
    assert (head.startswith("http/1.1 200"), end) == (True, "closed")
    head, end = await spoken(port, b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", 1)
    assert head.startswith("http/1.1 200")


async def test_answers_of_a_router_that_drains_close_their_connections() -> None:
    stop = StopSignal()
    async with Bench([prefill(), decode(step_s=0.02)]) as bench, router(bench, stop) as (client, run):
        port = client.base_url.port
        assert port
        body = httpx.Request("POST", client.base_url, json=BODY | {"max_tokens": 20, "stream": False}).content
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await asyncio.sleep(0.15)
        stop.handle(15)
        answer = (await asyncio.wait_for(reader.read(), 5)).decode().lower()
        assert answer.startswith("http/1.1 200")
        assert "connection: close" in answer
        writer.close()
        await asyncio.wait_for(asyncio.shield(run), 5)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A key and a certificate of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    key, pem = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", pem, "-days", "2")
    subprocess.run(
        ["openssl", *made, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return key, pem


async def _served(bench: Bench, settings: RouterSettings, ask: object) -> None:
    stop, sock = StopSignal(), bind("127.0.0.1", 0)
    run = asyncio.create_task(run_router(settings, ClusterSecrets(settings), bench.store, sock, stop))
    try:
        await asyncio.wait_for(ask(sock.getsockname()[1]), 30)  # type: ignore[operator]
    finally:
        stop.handle(2)
        await run
        sock.close()


async def test_tls_and_its_deadlines(certificate: tuple[str, str]) -> None:
    key, pem = certificate
    settings = RouterSettings(served_model_name=("m",), ssl_keyfile=key, ssl_certfile=pem, header_timeout=0.3)
    context = ssl.create_default_context(cafile=pem)

    async def ask(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, trust_env=False) as client:
            while True:
                try:
                    if (await client.get("/ready?nodes=1")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)
            answer = await client.post("/v1/completions", json=BODY | {"max_tokens": 4})
            assert answer.text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.TransportError):
                await httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False).get("/health")
        head, end = await spoken(port, b"GET /health HTTP/1.1\r\nhost", 1, context)
        assert (head.startswith("http/1.1 408"), end) == (True, "closed")

    async with Bench([prefill(), decode()]) as bench:
        await _served(bench, settings, ask)


async def test_three_hundred_handshakes_that_are_never_made_are_ended(certificate: tuple[str, str]) -> None:
    key, pem = certificate
    settings = RouterSettings(served_model_name=("m",), ssl_keyfile=key, ssl_certfile=pem, header_timeout=1.0)
    context = ssl.create_default_context(cafile=pem)

    async def ask(port: int) -> None:
        while True:
            try:
                await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.05)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        for _, writer in silent[::2]:
            writer.write(b"\x16\x03\x01\x02\x00")
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, trust_env=False) as client:
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            assert time.monotonic() - began < 2
        async with asyncio.timeout(8):
            ends = [await reader.read() for reader, _ in silent]
        assert not any(ends)
        for _, writer in silent:
            writer.close()

    async with Bench([decode()]) as bench:
        await _served(bench, settings, ask)


async def test_the_request_of_a_client_that_stops_reading_is_dropped_by_the_nodes() -> None:
    """Its answer is long enough to fill what the kernel and the transport hold of it."""
    settings = {"reader_timeout": 0.5}
    async with (
        Bench([prefill(), decode(step_s=0.001)]) as bench,
        router(bench, StopSignal(), **settings) as (client, _),
    ):
        port = client.base_url.port
        assert port
        stopped = []
        for _ in range(8):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", port))
            data = json.dumps({**BODY, "max_tokens": 4000, "logprobs": 0}).encode()
            sock.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            stopped.append(sock)
        await until(lambda: bench["d1"].running == 8, 5)
        neighbour = await client.post("/v1/completions", json=BODY | {"max_tokens": 4, "stream": False})
        assert neighbour.status_code == 200
        await until(lambda: bench["d1"].running == 0, 10)
        await until_told(client, "kvferry_requests_inflight 0.0")
        assert bench["d1"].cancels
        for sock in stopped:
            sock.close()


async def test_nobody_tokenises_for_clients_that_left() -> None:
    text = json.dumps({"prompt": "river stone cloud market " * 40_000}).encode()
    async with Bench([decode()]) as bench, router(bench, StopSignal()) as (client, _):
        port = client.base_url.port
        for _ in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
            writer.close()
        began = time.monotonic()
        assert (await client.post("/tokenize", content=text)).status_code == 200
        assert time.monotonic() - began < 20, "forty of them take half a minute and more"


async def test_clients_show_certificates_where_an_authority_is_named(certificate: tuple[str, str]) -> None:
    key, pem = certificate
    settings = RouterSettings(served_model_name=("m",), ssl_keyfile=key, ssl_certfile=pem, ssl_ca_certs=pem)

    async def status(port: int, own: bool) -> int:
        context = ssl.create_default_context(cafile=pem)
        if own:
            context.load_cert_chain(pem, key)
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            return (await client.get(f"https://127.0.0.1:{port}/health")).status_code

    async def ask(port: int) -> None:
        while True:
            try:
                assert await status(port, own=True) == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
        with pytest.raises(httpx.TransportError):
            await status(port, own=False)

    async with Bench([prefill(), decode()]) as bench:
        await _served(bench, settings, ask)


def test_connections_are_fewer_than_the_files_that_may_be_open(caplog: pytest.LogCaptureFixture) -> None:
    limits = connection_limits(RouterSettings(), 65_536)
    assert (limits.header_s, limits.connections, caplog.text) == (10.0, 65_280, "")
    assert connection_limits(RouterSettings(max_inflight=2000), 1024).connections == 768
    assert "raise the hard limit (ulimit -Hn) to 2256 or more" in caplog.text


def test_mistakes_in_tls_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        server_tls(RouterSettings(ssl_keyfile="x"))
    assert server_tls(RouterSettings()) == {}
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    import uvicorn

    config = uvicorn.Config("x", **server_tls(RouterSettings(ssl_certfile=str(empty))))
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        load(config)
