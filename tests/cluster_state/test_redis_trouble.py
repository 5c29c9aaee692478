"""Servers that answer wrongly, half, late or not at all; Sentinels that know no better. Every call ends in its time, by
RegistryUnavailable at worst, and the next one that can succeed does."""

import asyncio
import contextlib
import signal
import time

import pytest

from kvferry.cluster_state.index_writer import IndexWriter
from kvferry.cluster_state.redis_client import answered
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.registry import Announced
from kvferry.protocol.errors import RegistryFull, RegistryUnavailable
from kvferry.protocol.index_rows import key_and_tag, rows_of
from kvferry.protocol.lease import NodeLease
from tests.redis_servers import MASTER, free_ports, redis_server, watched
from tests.waiting import until

HASHES = [bytes([i]) * 16 for i in range(20)]
ROWS = rows_of(HASHES)
LEASE = NodeLease("a", "decode", 5, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)


class Between:
    """A way to a server on which answers can be changed. `instead`: what answers each script; `half`: of the server's
    answers so many bytes come, and no more; `mute`: nothing comes, whatever is sent, and nothing is said about it;
    `old`: scripts have no flags, as before Redis 7."""

    def __init__(self, port: int) -> None:
        self._onward = port
        self.instead: bytes | None = None
        self.half: int | None = None
        self.mute = self.old = False
        self.accepted = 0

    async def __aenter__(self) -> "Between":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        back, onward = await asyncio.open_connection("127.0.0.1", self._onward)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._ask(reader, writer, onward), self._answer(back, writer))
        onward.close()

    async def _ask(self, reader, writer, onward) -> None:
        while data := await reader.read(1 << 20):
            if self.mute:
                continue
            if self.instead is not None and b"EVALSHA" in data:
                writer.write(self.instead)
            elif self.old and b"#!lua" in data:
                writer.write(b"-ERR Error compiling script (new function): user_script:1: unexpected symbol\r\n")
            else:
                onward.write(data)
        onward.close()

    async def _answer(self, back, writer) -> None:
        while data := await back.read(1 << 20):
            if not self.mute:
                writer.write(data if self.half is None else data[: self.half])
        writer.close()


@pytest.fixture(scope="module")
def server():
    with redis_server() as running:
        yield running


@pytest.fixture
async def between(server):
    with server.client() as client:
        client.flushall()
    async with Between(server.port) as way:
        yield way


@pytest.fixture
async def store(between):
    store = RedisStore(between.url, "test", timeout_s=0.5, lookup_s=0.2)
    yield store
    await store.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "loading"),
        (b"-READONLY You can't write against a read only replica.\r\n", "READONLY"),
        (b"-MISCONF Redis is configured to save RDB snapshots\r\n", "MISCONF"),
        (b"-NOREPLICAS Not enough good replicas to write.\r\n", "NOREPLICAS"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "MASTERDOWN"),
        (b"-BUSY Redis is busy running a script.\r\n", "BUSY"),
        (b"-NOAUTH Authentication required.\r\n", "NOAUTH"),
        (b"-CLUSTERDOWN Hash slot not served\r\n", "Cluster mode"),
        (b"-ERR The user executing the script can't run this command: x, on @user_script:5.\r\n", "HSET"),
        (b"-ERR max number of clients reached\r\n", "max number"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "Redis"),
        (b"*x\r\n", "Redis"),
        (b"\x00\xff\xfe", "Redis"),
        (b":7\r\n", "invalid answer"),
        (b"*-1\r\n", "invalid answer"),
        (b"$3\r\n\xff\xfe\xfd\r\n", "invalid answer"),
    ],
)
async def test_a_server_that_answers_with_errors_or_rubbish_is_unavailable(between, store, answer, told):
    await store.announce(LEASE)
    between.instead = answer
    calls = [
        lambda: store.announce(LEASE),
        store.nodes,
        lambda: store.publish("a", 5, ROWS, []),
        lambda: store.longest_prefix(HASHES, {"a": 5}),
        lambda: store.present("a", 5, ROWS),
        lambda: store.next_epoch("a", 5),
    ]
    for call in calls:
        began = time.monotonic()
        with contextlib.suppress(RegistryUnavailable):  # the only error there may be; some calls take any answer
            await call()
        assert time.monotonic() - began < 3
    with pytest.raises(RegistryUnavailable, match=told):
        await store.announce(LEASE)
    between.instead = None
    assert await store.announce(LEASE) in (Announced.RENEWED, Announced.CREATED)
    await store.publish("a", 5, ROWS, [])
    assert await store.longest_prefix(HASHES, {"a": 5}) == {"a": 20}


async def test_half_an_answer_does_not_become_the_next_one(between, store):
    await store.announce(LEASE)
    await store.publish("a", 5, ROWS, [])
    for cut in (1, 5, 60):
        between.half = cut
        calls = [store.nodes(), *(store.longest_prefix(HASHES[:n], {"a": 5}) for n in range(1, 21)), store.nodes()]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, RegistryUnavailable) for one in (ended[0], ended[-1]))
        between.half = None
        for n in range(1, 21):
            assert await store.longest_prefix(HASHES[:n], {"a": 5}) == {"a": n}
        assert await store.nodes() == [LEASE]


async def test_a_half_open_connection_costs_one_call_and_not_one_for_each_connection(between, store):
    """The server is gone and nothing says so: of many connections the first that fails takes the others along."""
    await asyncio.gather(*(store.present("a", 5, ROWS) for _ in range(12)))
    before = between.accepted
    assert before >= 8
    between.mute = True
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match=r"Timeout|in time"):
        await store.announce(LEASE)
    assert time.monotonic() - began < 3.0
    between.mute = False
    await asyncio.gather(*(store.present("a", 5, ROWS) for _ in range(12)))


async def test_connections_that_are_closed_under_their_users_are_unavailable_at_worst(store):
    """The client library meets what it did not expect, at some of the moments."""
    await store.announce(LEASE)
    for turns in range(30):
        call = asyncio.create_task(store.announce(LEASE))
        for _ in range(turns):
            await asyncio.sleep(0)
        await store._client.connection_pool.disconnect(inuse_connections=True)
        with contextlib.suppress(RegistryUnavailable):
            await call
    assert await store.announce(LEASE) is Announced.RENEWED


async def test_closing_takes_no_time_beyond_a_call_s_own(store, monkeypatch):
    """Over TLS a peer that is gone never says goodbye."""
    await asyncio.gather(*(store.present("a", 5, ROWS) for _ in range(4)))
    monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", lambda self: asyncio.sleep(9))
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="in time"):
        await answered(store._client, asyncio.sleep(9), 0.2)
    assert time.monotonic() - began < 0.45


async def test_an_outage_is_no_stampede(between, store):
    """However many requests there are, connections are tried one after the other by those who keep the node's place."""
    writer = IndexWriter(store, "a", 5, lambda: ROWS, flush_s=0.01)
    await writer.start()
    between.mute = True
    await asyncio.sleep(0.3)
    before = between.accepted
    await asyncio.sleep(1.5)
    assert between.accepted - before <= 8
    between.mute = False
    await _comes(8, lambda: store.present("a", 5, ROWS), 20)
    await writer.stop()


async def test_a_server_that_knows_no_flags_of_scripts_does(server, between, store):
    with server.client() as client:
        client.script_flush()
    between.old = True
    for outcome in (Announced.CREATED, Announced.RENEWED):
        assert await store.announce(LEASE) is outcome
    assert await store.next_epoch("z", 7) == 7


async def test_a_full_server_keeps_leases_and_what_it_has(server, between, store, caplog):
    hashes = [n.to_bytes(16, "little") for n in range(3000)]
    many = rows_of(hashes)
    held = dict.fromkeys(many[:1000])
    writer = IndexWriter(store, "a", 5, lambda: held, flush_s=0.01)
    await store.announce(LEASE)
    assert await writer.flush()
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        try:
            assert await store.announce(LEASE) is Announced.RENEWED
            assert await store.announce(NodeLease("b", *[getattr(LEASE, name) for name in LEASE.__slots__][1:])) is (
                Announced.CREATED
            )
            assert await store.next_epoch("c", 7) == 7
            with pytest.raises(RegistryFull, match="maxmemory"):
                await store.publish("a", 5, many[2000:], [])
            await store.refresh("a", 5, many[:9])
            writer.note(many[1000:2000], [])
            for _ in range(20):
                await writer.flush()
            assert [record.getMessage() for record in caplog.records if "Redis is full" in record.getMessage()] == [
                "1000 rows were not written to the block index: Redis is full: its maxmemory is used up, and "
                "its policy evicts "
                "nothing"
            ]
            writer.note([], many[900:1000])
            await writer.flush()
            assert await store.longest_prefix(hashes, {"a": 5}) == {"a": 900}, "removals go on"
        finally:
            client.config_set("maxmemory", 0)
    await _comes(10, writer.flush, True)
    assert not writer.pending
    assert await store.present("a", 5, many[1000:2000]) == 1000


async def test_a_store_that_went_back_in_time_is_mended_though_the_lease_is_renewed(server, between, store):
    """A replica that lagged became master: the lease is there, and the rows written last are not."""
    hashes = [n.to_bytes(16, "little") for n in range(2000)]
    rows = rows_of(hashes)
    writer = IndexWriter(store, "a", 5, lambda: rows, flush_s=0.01, sample_s=0.05)
    await store.announce(LEASE)
    await writer.start()
    await until(lambda: writer.rows == 2000)
    with server.client() as client:
        client.delete(*(b"kvferry:test:g:" + key_and_tag(row)[0] for row in rows[1990:]))
    assert await store.announce(LEASE) is Announced.RENEWED
    await _comes(3, lambda: store.longest_prefix(hashes, {"a": 5}), {"a": 2000})
    await writer.stop()


async def _comes(limit_s: float, call, answer) -> None:
    """Wait until the call gives this answer."""
    given = None
    async with asyncio.timeout(limit_s):
        while given != answer:
            await asyncio.sleep(0.05)
            given = await call()


async def test_sentinels_that_do_not_answer_or_name_the_dead(caplog):
    """Refused at once where nobody listens; a frozen Sentinel costs half a bound, once; a dead master that they still
    name is unavailable until they name another; one that woke up as master of nobody is left."""
    with watched() as watch:
        dead = free_ports(1)[0]
        url = watch.url.replace("redis+sentinel://", f"redis+sentinel://127.0.0.1:{dead},")
        store, other = RedisStore(url, "test"), RedisStore(watch.url, "test")
        watch.sentinels[0].signal(signal.SIGSTOP)
        assert await store.check()
        assert await store.announce(LEASE) is Announced.CREATED
        began = time.monotonic()
        assert await store.announce(LEASE) is Announced.RENEWED
        assert time.monotonic() - began < 0.45, "who answered is asked first"
        watch.sentinels[0].signal(signal.SIGCONT)

        old = watch.master
        old.signal(signal.SIGSTOP)
        began, answered = time.monotonic(), 0.0
        while not answered:
            call = time.monotonic()
            with contextlib.suppress(RegistryUnavailable):
                await store.announce(LEASE)
                answered = time.monotonic() - began
            assert time.monotonic() - call < 3.5
            assert time.monotonic() - began < 20
            await asyncio.sleep(0.1)
        old.signal(signal.SIGCONT)
        await _comes(15, other.nodes, [LEASE])
        assert watch.master is not old
        unknown = RedisStore(watch.url.replace(f"/{MASTER}", "/nobody"), "test")
        with pytest.raises(RegistryUnavailable, match="nobody"):
            await unknown.check()
        for each in (store, other, unknown):
            await each.close()
