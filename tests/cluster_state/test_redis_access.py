"""Who may use Redis and over what: the ACL of the documents, passwords that change, TLS, Cluster mode."""

import asyncio
import contextlib
import re
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from kvferry.cluster_state import redis_responses, redis_scripts, row_scripts
from kvferry.cluster_state.redis_responses import RedisResponses
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.decode_worker.service import DecodeService
from kvferry.protocol.errors import ConfigError, RegistryRefuses, RegistryUnavailable
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.settings import RouterSettings, WorkerSettings
from kvferry.router.main import serve_router
from kvferry.runtime.signals import StopSignal
from kvferry.worker.node import Node
from tests.redis_servers import RedisServer, free_ports, redis_server

HASHES = [bytes([i]) * 16 for i in range(20)]
ROWS = rows_of(HASHES)
LEASE = NodeLease("a", "decode", 5, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)
DOCUMENT = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
RULE = re.search(r"ACL SETUSER kvferry (.*)", DOCUMENT)
SENTINELS_RULE = "".join(re.findall(r"`(ACL SETUSER kvferry-sentinel .*?)`", DOCUMENT))
PASSWORD = "hunter2"


@pytest.fixture(scope="module")
def server():
    with redis_server() as running:
        yield running


@pytest.fixture
def words(server: RedisServer) -> list[str]:
    """The rule of the documents, for a new user of theirs."""
    assert RULE is not None
    with server.client() as client:
        client.flushall()
        client.acl_deluser("kvferry")
    return RULE[1].replace("PASSWORD", PASSWORD).split()


def allow(server: RedisServer, words: list[str]) -> str:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "kvferry", "reset", *words)
    return f"redis://kvferry:{PASSWORD}@127.0.0.1:{server.port}/0"


async def everything(url: str, **options: Any) -> None:
    """All that kvferry ever asks of Redis."""
    store, kept = (
        RedisStore(url, "test", **options),
        RedisResponses(url, "test", ttl_s=9, share=100, max_records=2, **options),
    )
    try:
        await store.check()
        await store.ping()
        assert await store.next_epoch("a", 5) >= 5
        await store.announce(LEASE)
        assert await store.nodes() == [LEASE]
        await store.publish("a", 5, ROWS, [])
        await store.publish("b", 5, ROWS, [])
        await store.refresh("a", 5, ROWS[:9])
        assert await store.present("a", 5, ROWS) == 20
        assert await store.longest_prefix(HASHES, {"a": 5}) == {"a": 20}
        await store.publish("a", 5, [], ROWS)
        await store.withdraw("a", 5)
        assert await store.nodes() == []
        for name in "wxyz":
            assert await kept.put("t", name, b"1" * 40)
        assert await kept.get("t", "z") == b"1" * 40
        assert await kept.delete("t", "z")
    finally:
        await store.close()
        await kept.close()


@pytest.mark.parametrize("more", ["", "?client_name=kv", "?protocol=2"])
async def test_the_documented_acl_is_enough(server, words, more):
    await everything(allow(server, words) + more)


async def test_the_documented_acl_of_sentinels_is_enough(server, words):
    allow(server, words)
    (port,) = free_ports(1)
    conf = (f"sentinel monitor kv 127.0.0.1 {server.port} 1", "user default on nopass +@all")
    sentinel = RedisServer(port, "--sentinel", conf=conf)
    try:
        url = (
            f"redis+sentinel://kvferry:{PASSWORD}@127.0.0.1:{port}/kv"
            f"?sentinel_username=kvferry-sentinel&sentinel_password={PASSWORD}"
        )
        with sentinel.client() as client:
            client.execute_command(*SENTINELS_RULE.replace("PASSWORD", PASSWORD).split())
            await everything(url)
            client.execute_command("ACL", "SETUSER", "kvferry-sentinel", "-sentinel")
        store = RedisStore(url, "test")
        with pytest.raises(RegistryRefuses, match=r"Sentinel.*docs/redis.md"):
            await store.check()
        await store.close()
    finally:
        sentinel.close()


def test_the_rehearsal_tries_each_command_of_the_scripts():
    scripts = [each for module in (redis_scripts, row_scripts, redis_responses) for each in vars(module).items()]
    text = "".join(
        each for name, each in scripts if isinstance(each, str) and name not in ("CHECK_COMMANDS", "__doc__")
    )
    used = {name.lower() for name in re.findall(r"\w\('([A-Z]+)'", text)}
    assert used <= {words.split()[0] for words in redis_scripts.COMMANDS}
    assert len(used) > 15


async def test_with_one_command_less_a_line_at_the_start_names_it(server, words):
    commands = [word for word in words if word.startswith("+")]
    assert {f"+{each.split()[0]}" for each in redis_scripts.COMMANDS} <= set(commands)
    spare = ("+info", "+client|setinfo", "+client|setname", "+select")  # without these it does
    for missing in set(commands) - {*spare}:
        store = RedisStore(allow(server, [word for word in words if word != missing]), "test")
        with pytest.raises(RegistryRefuses) as caught:
            await store.check()
        assert re.search(rf"\b{missing[1:].split('|')[0]}\b", caught.value.message, re.IGNORECASE), caught.value.message
        assert "docs/redis.md" in caught.value.message
        assert PASSWORD not in caught.value.message
        await store.close()
    for spared in spare:
        await everything(allow(server, [word for word in words if word != spared]))


async def test_other_keys_are_out_of_reach(server, words):
    store = RedisStore(allow(server, ["~other:*" if word.startswith("~") else word for word in words]), "test")
    with pytest.raises(RegistryRefuses, match=r"kvferry:test:\*|access a key|of the keys"):
        await store.check()
    await store.close()


async def test_a_command_that_is_forbidden_later_is_named_and_may_return(server, words):
    store = RedisStore(allow(server, words), "test")
    await store.announce(LEASE)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "kvferry", "-hset")
        with pytest.raises(RegistryUnavailable, match=r"(?i)'hset'"):
            await store.announce(LEASE)
        assert await store.longest_prefix(HASHES, {"a": 5}) == {}
        client.execute_command("ACL", "SETUSER", "kvferry", "+hset")
    await store.announce(LEASE)
    await store.close()


async def test_a_password_that_changes_is_read_again(server, words, tmp_path):
    allow(server, words)
    (tmp_path / "password").write_text(PASSWORD + "\n")
    url = f"redis://kvferry@127.0.0.1:{server.port}/0"
    store = RedisStore(url, "test", password_file=str(tmp_path / "password"))
    await everything(url, password_file=str(tmp_path / "password"))
    await store.announce(LEASE)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "kvferry", "resetpass", ">other")
        client.execute_command("CLIENT", "KILL", "USER", "kvferry")
        for _ in range(2):
            with pytest.raises(RegistryUnavailable, match="password") as caught:
                await store.announce(LEASE)
            assert PASSWORD not in str(caught.value)
        with pytest.raises(RegistryRefuses, match="refuses"):
            await store.check()
        (tmp_path / "password").write_text("other")
        await store.announce(LEASE)
    await store.close()


async def test_a_server_that_wants_a_password_says_so(server):
    with server.client() as client:
        client.execute_command("CONFIG", "SET", "requirepass", PASSWORD)
    try:
        store = RedisStore(server.url, "test")
        with pytest.raises(RegistryRefuses, match=r"refuses: .*NOAUTH|refuses: .*authenticated"):
            await store.check()
        await store.close()
    finally:
        with server.client(password=PASSWORD) as client:
            client.execute_command("CONFIG", "SET", "requirepass", "")


async def test_a_database_that_the_server_has_not_is_told_at_the_start(server):
    store = RedisStore(server.url.replace("/0", "/99"), "test")
    with pytest.raises(ConfigError, match="DB index"):
        await store.check()
    await store.close()


async def test_cluster_mode_is_refused_in_one_line():
    with redis_server("--cluster-enabled", "yes", "--cluster-port", str(free_ports(1)[0])) as clustered:
        store = RedisStore(clustered.url, "test")
        with pytest.raises(ConfigError, match="Cluster mode") as caught:
            await store.check()
        assert "\n" not in caught.value.message
        with pytest.raises(RegistryUnavailable, match="Cluster mode"):
            await store.announce(LEASE)
        with pytest.raises(ConfigError, match="Cluster mode"):
            await serve_router(RouterSettings(port=0, redis_url=clustered.url))
        with pytest.raises(ConfigError, match="Cluster mode"):
            await Node(WorkerSettings(role="decode", port=0, redis_url=clustered.url), DecodeService).run(StopSignal())
        with clustered.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        for _ in range(100):
            with pytest.raises(RegistryUnavailable, match="Cluster mode"):
                await store.announce(LEASE)
            await asyncio.sleep(0.01)
        await store.close()


@pytest.mark.parametrize(("policy", "told"), [("volatile-ttl", 1), ("allkeys-lru", 0), ("noeviction", 0)])
async def test_a_policy_that_evicts_leases_first_is_told(server, caplog, policy, told):
    with server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", policy)
        store = RedisStore(server.url, "test")
        await store.check()
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", "noeviction")
    assert sum(policy in record.getMessage() for record in caplog.records) == told
    await store.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """ca.pem, and by it cert.pem with key.pem, of 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    ours = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    for line in (
        ("req", "-x509", *ours, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca"),
        ("req", "-x509", *ours, "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "key.pem", "-out", "cert.pem",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"),
    ):  # fmt: skip
        subprocess.run(["openssl", *line], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


@contextlib.asynccontextmanager
async def over_tls(server: RedisServer, folder: Path):
    """The port of a way to the server over TLS, which asks for a client's certificate. The Valkey that tests run has
    none built in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(copy(reader, back), copy(onward, writer))

    listening = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    yield listening.sockets[0].getsockname()[1]
    listening.close()


async def test_tls_with_certificates_of_both_sides(server, words, certificates):
    allow(server, words)
    async with over_tls(server, certificates) as port:
        at = f"kvferry:{PASSWORD}@127.0.0.1:{port}/0"
        ca, own = (
            f"ssl_ca_certs={certificates}/ca.pem",
            f"ssl_certfile={certificates}/cert.pem&ssl_keyfile={certificates}/key.pem",
        )
        await everything(f"rediss://{at}?{ca}&{own}")
        await everything(f"rediss://{at}?ssl_cert_reqs=none&{own}")
        for wrong, why in (
            (f"rediss://{at}?{own}", "certificate verify failed"),
            (f"rediss://{at}?{ca}", "Redis"),
            (f"rediss://kvferry:{PASSWORD}@localhost:{port}/0?{ca}&{own}", "certificate verify failed"),
            (f"redis://{at}", "Redis"),
        ):
            store = RedisStore(wrong, "test", timeout_s=2.0)
            with pytest.raises(RegistryUnavailable, match=why) as caught:
                await store.check()
            assert PASSWORD not in caught.value.message
            await store.close()


async def test_sentinels_passwords_are_not_told_and_closing_never_raises(monkeypatch):
    """Up to redis-py 7.1 its Sentinels are closed one by one."""
    monkeypatch.delattr(Sentinel, "aclose", raising=False)
    store = RedisStore(
        f"redis+sentinel://127.0.0.1:1,127.0.0.1:2/kv?sentinel_username=v&sentinel_password={PASSWORD}", "test"
    )
    for call in (store.check, store.ping, store.nodes):
        with pytest.raises(RegistryUnavailable, match=r"no Sentinel answers$"):
            await call()
    closed = []

    async def aclose(self):
        closed.append(self)
        raise ValueError("unexpected error")

    pool = cast(SentinelConnectionPool, store._client.connection_pool)
    monkeypatch.setattr(redis.asyncio.Redis, "aclose", aclose)
    await store.close()
    assert closed == [store._client, *pool.sentinel_manager.sentinels]
