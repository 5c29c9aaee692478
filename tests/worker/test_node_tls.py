"""A worker over TLS: the router verifies its certificate, and sends nothing where it cannot."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.protocol.errors import ConfigError, NodeLost
from kvferry.protocol.messages import CancelRequest, StepFrame
from kvferry.router.api.probes import _labels
from kvferry.router.nodes.client import NodeClient
from kvferry.runtime.tls import PLAIN, WorkerTls, worker_tls
from tests.toy import make_engine
from tests.waiting import until
from tests.worker_pair import worker

CANCEL = CancelRequest("r", 0)


def certificate(folder: Path, name: str) -> dict[str, Any]:
    """A key and a certificate of this name, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    folder.mkdir()
    files = {"ssl_keyfile": str(folder / "key.pem"), "ssl_certfile": str(folder / "cert.pem")}
    made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    subprocess.run(
        ["openssl", *made, "-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"], "-subj", f"/CN={name}",
         "-addext", f"subjectAltName={name}"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return files


async def cancelled(lease: object, tls: WorkerTls) -> None:
    client = NodeClient("router", tls=tls)
    try:
        await client.cancel(lease, CANCEL)  # type: ignore[arg-type]
    finally:
        await client.aclose()


async def test_calls_and_the_token_stream_go_over_tls(tmp_path: Path) -> None:
    files = certificate(tmp_path / "a", "IP:127.0.0.1")
    async with worker("decode", make_engine(), **files) as node:
        lease, frames = node.loaded.lease(), list[StepFrame]()
        assert lease.http_url.startswith("https://127.0.0.1:")
        assert _labels(lease)["__scheme__"] == "https"
        client = NodeClient("router", tls=worker_tls(files["ssl_certfile"], ""))
        opened = asyncio.Event()
        listens = asyncio.create_task(client.stream(lease, None, opened.set, frames.append))
        await asyncio.wait_for(opened.wait(), 10)
        await client.cancel(lease, CANCEL)
        await until(lambda: bool(frames))
        listens.cancel()
        await asyncio.gather(listens, return_exceptions=True)
        await client.aclose()


async def test_a_certificate_is_of_the_name_that_is_asked_for_and_of_a_known_authority(tmp_path: Path) -> None:
    """A pod's certificate need not carry its address: all workers may share one name."""
    files, others = certificate(tmp_path / "a", "DNS:kvferry-worker"), certificate(tmp_path / "b", "DNS:kvferry-worker")
    async with worker("decode", make_engine(), **files) as node:
        lease, known = node.loaded.lease(), files["ssl_certfile"]
        await cancelled(lease, worker_tls(known, "kvferry-worker"))
        for tls in (
            worker_tls(known, ""),
            worker_tls(known, "another"),
            worker_tls(others["ssl_certfile"], "kvferry-worker"),
        ):
            with pytest.raises(NodeLost, match="certificate"):
                await cancelled(lease, tls)
        with pytest.raises(NodeLost, match="--worker-ca-certs"):
            await cancelled(lease, PLAIN)
        with pytest.raises(NodeLost):
            await cancelled(replace(lease, http_url=lease.http_url.replace("https", "http")), PLAIN)


async def test_a_router_that_asks_for_tls_sends_nothing_in_clear(tmp_path: Path) -> None:
    files = certificate(tmp_path / "a", "IP:127.0.0.1")
    async with worker("decode", make_engine()) as node:
        with pytest.raises(NodeLost, match="its address has no TLS"):
            await cancelled(node.loaded.lease(), worker_tls(files["ssl_certfile"], ""))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--worker-server-name needs --worker-ca-certs"):
        worker_tls("", "name")
    with pytest.raises(ConfigError, match="--worker-ca-certs"):
        worker_tls(str(tmp_path / "none.pem"), "")
