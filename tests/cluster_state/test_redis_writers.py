"""A Redis that takes orders without a password is named: by the log of each process, and by the doctor."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cluster_state import redis_check
from kvferry.cluster_state.redis_check import EVERY_HOST, LOCAL_USERS
from kvferry.cluster_state.redis_store import RedisStore
from tests.redis_servers import RedisServer, free_ports

PASSWORD = "hunter2"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(free_ports(1)[0], "--unixsocket", str(tmp_path / "socket"), folder=tmp_path)
    yield server
    server.close()


async def writers(url: str) -> str:
    """What a process is told when it starts."""
    store = RedisStore(url, "test")
    try:
        await store.check()
        return store.open_to
    finally:
        await store.close()


async def test_a_server_without_a_password_is_open_to_its_machine_or_to_all(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert await writers(server.url) == LOCAL_USERS
    monkeypatch.setattr(redis_check, "is_loopback", lambda host: False)
    assert await writers(server.url) == EVERY_HOST
    line = caplog.messages[-1]
    assert line == f"Redis at {server.url} accepts commands without a password from {EVERY_HOST}"
    with server.client() as client:
        assert client.keys() == [], "it was asked, and nothing was written"


async def test_a_password_in_our_url_does_not_hide_that_others_need_none(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "kvferry", "on", f">{PASSWORD}", "~*", "+@all")
    ours = f"redis://kvferry:{PASSWORD}@127.0.0.1:{server.port}/0"
    assert await writers(ours) == LOCAL_USERS
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-@write")
    assert await writers(ours) == "", "the others may only read"
    with server.client(username="kvferry", password=PASSWORD) as client:
        client.execute_command("ACL", "SETUSER", "default", "off")
    assert await writers(ours) == ""


async def test_a_socket_is_open_to_those_who_reach_it(server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    url = f"unix://{path}"
    entered = [folder for folder in (tmp_path, *tmp_path.parents) if not folder.stat().st_mode & 0o001]
    path.chmod(0o777)
    if entered:
        assert await writers(url) == "", f"nobody else enters {entered[0]}"
    modes = {folder: folder.stat().st_mode for folder in entered}
    try:
        for folder in entered:
            folder.chmod(0o755)
        assert await writers(url) == LOCAL_USERS
        path.chmod(0o700)
        assert await writers(url) == ""
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode & 0o7777)


async def test_a_server_that_hangs_costs_a_bounded_time(server: RedisServer) -> None:
    server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(5):
            assert await redis_check.writers(server.url, "test:", 0.5) == ""
    finally:
        server.signal(signal.SIGCONT)
