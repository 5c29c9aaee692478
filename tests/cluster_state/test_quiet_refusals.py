"""A Redis that refuses everybody for long: the log says so once, and once that it is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.model_files.model_name import ModelName
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_table import NodeTable
from kvferry.worker.membership import Membership
from tests.redis_servers import RedisServer, redis_server
from tests.waiting import until

LEASE = NodeLease("a", "decode", 5, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)
REFUSED_S = 3.0
LINES = 6
"""Of a node and a router together: the lease, its lapse, the index, the registry, and what Redis' client thinks."""


def wants_password(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("requirepass", "hunter2")
        client.client_kill_filter(_type="normal", skipme=True)


def knows_another(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
        client.client_kill_filter(_type="normal", skipme=True)


def opened(server: RedisServer) -> None:
    with server.client(password="other") as client:
        client.execute_command("ACL", "SETUSER", "default", "nopass")


def let_in(server: RedisServer) -> None:
    with server.client(password="hunter2") as client:
        client.config_set("requirepass", "")


@asynccontextmanager
async def member_and_router(url: str) -> AsyncIterator[tuple[Membership, NodeTable]]:
    """Each with a client of its own, as two processes have."""
    store, other = RedisStore(url, "test"), RedisStore(url, "test")
    node = Membership(store, lambda: LEASE, lambda: [bytes([i]) * 16 for i in range(9)], WorkerMetrics("decode"))
    table = NodeTable(other, RouterMetrics())
    table.add(ModelNodes(ModelName("m")))
    await node.join()
    await table.start()
    try:
        yield node, table
    finally:
        await table.stop()
        await node.leave()
        await node.close()
        await other.close()


@pytest.mark.parametrize(
    ("refuse", "heal"),
    [(wants_password, let_in), (knows_another, opened), (RedisServer.kill, RedisServer.start)],
    ids=["NOAUTH", "WRONGPASS", "down"],
)
async def test_an_outage_is_a_line_and_not_a_line_each_time(
    refuse: Callable[[RedisServer], None], heal: Callable[[RedisServer], None], caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server() as server:
        url = f"redis://:wrong@127.0.0.1:{server.port}/0" if refuse is knows_another else server.url
        async with member_and_router(url) as (node, table):
            assert table.registry_health.up
            caplog.clear()
            with caplog.at_level(logging.INFO):
                refuse(server)
                await until(lambda: not table.registry_health.up)
                await asyncio.sleep(REFUSED_S)
                told: list[Any] = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
                assert 2 <= len(told) <= LINES, "\n".join(told)
                heal(server)
                await until(lambda: table.registry_health.up and node.held)
                assert len(caplog.records) <= 2 * LINES
