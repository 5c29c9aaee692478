"""How the hosts of a node meet: who is let in, who is refused and why, and what each does when the other ends."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest

from kvferry.model_files.unsupported_models import resolve_runnable
from kvferry.protocol.errors import ConfigError, Incompatible
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.signals import StopSignal
from kvferry.worker.hosts import follower, join_message, listener, sealed_socket
from kvferry.worker.hosts.follower import Follower
from kvferry.worker.hosts.join_message import HOST, JoinMessage, require_hosts, terms
from kvferry.worker.hosts.listener import HostListener
from kvferry.worker.hosts.sealed_socket import SealedSocket, dial
from kvferry.worker.ranks import CALLS, MOVES
from tests.waiting import until, wait_for
from tests.worker.several_hosts import hosts_of
from tests.worker.test_rank_processes import saved

REVISION = "a" * 32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny") / "tiny", "LlamaConfig", head_dim=16)


@pytest.fixture
def settings(path: Path) -> WorkerSettings:
    return hosts_of(path, 3)


@pytest.fixture
def first(settings: WorkerSettings) -> Iterator[HostListener]:
    made = HostListener(settings, REVISION)
    yield made
    made.close()


def joined(settings: WorkerSettings, number: int = 1, purpose: str = HOST, **given: Any) -> tuple[SealedSocket, str]:
    """The line of a host or a rank, and host 0's token."""
    revision = given.pop("revision", REVISION)
    greets = JoinMessage(purpose, number, address=f"127.0.0.{number + 1}", **given).encode()
    agreed = terms(settings, ClusterSecrets(settings), revision)
    line, welcome = dial("127.0.0.1", settings.master_port, f"127.0.0.{number + 1}", agreed, greets)
    return line, JoinMessage.decode(welcome).meeting


def line_of(first: HostListener, purpose: str, number: int) -> SealedSocket:
    """Host 0's end of a line, once it is there."""
    wait_for(lambda: first._lines.get((purpose, number)))
    found = first._lines[purpose, number]
    assert found is not None
    return found


def test_hosts_and_their_ranks_are_let_in_and_hear_each_other(first: HostListener, settings: WorkerSettings) -> None:
    with ThreadPoolExecutor(1) as threads:
        met = threads.submit(first.meet)
        lines = [joined(settings, 2)]
        assert not met.done(), "host 1 is late"
        lines.append(joined(settings, 1))
        met.result(10.0)
    assert [first.hosts[number].address for number in (1, 2)] == ["127.0.0.2", "127.0.0.3"]
    assert line_of(first, HOST, 2).host == "127.0.0.3"
    calls, _ = joined(settings, 1, CALLS, meeting=lines[0][1])
    ours = line_of(first, CALLS, 1)
    for size in (0, 1, sealed_socket.SMALL_BYTES, 3 << 20):
        ours.send_bytes(bytes(size))
        assert calls.recv_bytes() == bytes(size)
        calls.send_bytes(b"x" * size)
        assert ours.recv_bytes() == b"x" * size
    for line in (calls, *(line for line, _ in lines)):
        line.close()
    with pytest.raises(EOFError):
        ours.recv_bytes()


@pytest.mark.parametrize(
    ("changed", "given", "why"),
    [
        ({}, {"revision": "b" * 32}, "model revision differs: b{32} on one node, a{32} on the other"),
        ({"nnodes": 2}, {}, "nnodes differs: 2 on one node, 3 on the other"),
        ({"tensor_parallel_size": 6}, {}, "tensor_parallel_size differs"),
        ({"cluster": "other"}, {}, "cluster differs"),
        ({"role": "prefill"}, {}, "role differs"),
        ({"cluster_secret": "of somebody else's"}, {}, "the two nodes do not share a cluster secret"),
        ({}, {"number": 3}, "there is no place for a host 3"),
        ({}, {"purpose": "pictures"}, "a connection of unknown purpose"),
        ({}, {"purpose": CALLS, "meeting": "0" * 32}, "this rank belongs to an earlier start of the node"),
        ({}, {"threads": "many"}, "a host's join message has a wrong threads"),
    ],
)
def test_a_host_that_does_not_fit_is_told_why(
    first: HostListener, settings: WorkerSettings, changed: dict[str, Any], given: dict[str, Any], why: str
) -> None:
    with pytest.raises(Incompatible, match=why):
        joined(replace(settings, **changed), **given)
    assert not first.hosts


def test_nor_does_one_of_another_version(
    first: HostListener, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_message, "VERSION", "0.1")
    with pytest.raises(Incompatible, match=r"kvferry version differs: 0\.1 on one node"):
        joined(settings)


def test_a_place_is_taken_once(first: HostListener, settings: WorkerSettings) -> None:
    line, token = joined(settings)
    with pytest.raises(ConnectionRefusedError, match="host 1 has joined already"):
        joined(settings)
    rank, _ = joined(settings, 1, MOVES, meeting=token)
    with pytest.raises(ConnectionRefusedError, match="rank 1 has joined already"):
        joined(settings, 1, MOVES, meeting=token)
    line.close()
    rank.close()


def test_whoever_says_nothing_or_nonsense_keeps_nobody_out(first: HostListener, settings: WorkerSettings) -> None:
    where = ("127.0.0.1", settings.master_port)
    silent = [socket.create_connection(where) for _ in range(listener.MAX_JOINING // 2)]
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(64)):
        with socket.create_connection(where) as other, suppress(OSError):
            other.sendall(nonsense)
            other.shutdown(socket.SHUT_WR)
            while other.recv(1 << 16):
                pass
    line, _ = joined(settings)
    assert line_of(first, HOST, 1)
    line.close()
    for each in silent:
        each.close()


def test_hosts_that_do_not_come_are_named(first: HostListener, settings: WorkerSettings) -> None:
    line, _ = joined(settings)
    with pytest.raises(ConfigError, match="these have not joined within 0 s: host 2"):
        first.meet(0.1)
    with pytest.raises(ConfigError, match="these have not joined within 0 s: rank 1, rank 2"):
        first.ranks(CALLS, 0.1)
    line.close()


def test_a_taken_port_is_named(first: HostListener, settings: WorkerSettings) -> None:
    with pytest.raises(
        ConfigError, match=f"127.0.0.1 port {settings.master_port}: .*choose another --master-port"
    ) as e:
        HostListener(settings, REVISION)
    assert e.value.param == "master_port"


def test_a_message_that_another_wrote_or_that_is_too_long_ends_the_line(
    first: HostListener, settings: WorkerSettings
) -> None:
    token = joined(settings)[1]
    for number, forged in ((1, bytes(8 + 16)), (2, b"\xff" * 24)):
        line, _ = joined(settings, number, CALLS, meeting=token)
        line._socket.sendall(forged)
        with pytest.raises(OSError, match=r"wrong authentication code|the limit is"):
            line_of(first, CALLS, number).recv_bytes()
        line.close()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (lambda line: line.close(), r"host 1 \(127\.0\.0\.2\) has ended"),
        (
            lambda line: line.send_bytes(b'{"ended": "rank 1 ended (signal 9)"}'),
            r"has ended: rank 1 ended \(signal 9\)",
        ),
        (lambda line: None, "has not sent a heartbeat for 0 s"),
        (lambda line: line.send_bytes(b"{}"), "has failed: KeyError"),
    ],
    ids=["closed", "rank", "silent", "nonsense"],
)
def test_a_host_that_is_lost_leaves_nobody_waiting(
    first: HostListener,
    settings: WorkerSettings,
    monkeypatch: pytest.MonkeyPatch,
    how: Callable[[SealedSocket], None],
    why: str,
) -> None:
    if "heartbeat" in why:
        monkeypatch.setattr(listener, "LOST_S", 0.5)
    line, token = joined(settings)
    other, _ = joined(settings, 2)
    first.meet()
    calls, _ = joined(settings, 1, CALLS, meeting=token)
    ours = line_of(first, CALLS, 1)
    line.send_bytes(b'{"signs": [7], "leaving": false}')
    assert line.recv_bytes() == listener.LOADING
    first.ready = True
    line.send_bytes(b'{"signs": [8], "leaving": false}')
    assert line.recv_bytes() == listener.READY
    assert list(first.heartbeats) == [8, 0]
    how(line)
    with pytest.raises((EOFError, OSError)):
        ours.recv_bytes()
    assert re.search(why, first.fault)
    with pytest.raises(ConfigError, match=why):
        first.ranks(MOVES)
    for each in (calls, line, other):
        each.close()


def test_a_host_that_is_lost_before_all_have_met_leaves_its_place(
    first: HostListener, settings: WorkerSettings
) -> None:
    for _ in range(2):
        line, token = joined(settings)
        calls, _ = joined(settings, 1, CALLS, meeting=token)
        line.send_bytes(b'{"signs": [1], "leaving": false}')
        assert line.recv_bytes() == listener.LOADING, "while it waits for the others"
        line.close()
        wait_for(lambda: not first._lines)
        with pytest.raises(EOFError):
            calls.recv_bytes()
        calls.close()
    assert not first.fault


def test_nor_does_a_rank_keep_it_that_was_greeted_while_its_host_was_lost(
    first: HostListener, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeted, go = Event(), Event()

    def slowly(*given: Any) -> Any:
        found = sealed_socket.answer(*given)
        greeted.set()
        go.wait(10.0)
        return found

    host, token = joined(settings)
    line_of(first, HOST, 1)
    monkeypatch.setattr(listener, "answer", slowly)
    rank, _ = joined(settings, 1, CALLS, meeting=token)
    assert greeted.wait(10.0)
    host.close()
    wait_for(lambda: not first._lines)
    go.set()
    with pytest.raises((EOFError, OSError)):
        rank.recv_bytes()
    joined(settings, 1, CALLS, meeting=token)[0].close()


class Ranks:
    """In place of rank processes."""

    made: ClassVar[list[Ranks]] = []
    ended, closed = "", False

    def __init__(self, params: Any) -> None:
        self.heartbeats = [1]
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def two(path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    """Settings of the second host of two."""
    monkeypatch.setattr(follower, "LocalRanks", Ranks)
    monkeypatch.setattr(follower, "RETRY_S", 0.02)
    monkeypatch.setattr(Ranks, "made", [])
    return replace(hosts_of(path, 2), node_rank=1, host="127.0.0.2", port=0, drain_timeout=20.0)


@asynccontextmanager
async def running(settings: WorkerSettings) -> AsyncIterator[tuple[Follower, asyncio.Task[bool], StopSignal]]:
    made, stop = Follower(settings), StopSignal()
    run = asyncio.create_task(made.run(stop))
    try:
        yield made, run, stop
    finally:
        stop.handle(2)
        await asyncio.wait([run], timeout=10.0)


def revision_of(settings: WorkerSettings) -> str:
    return resolve_runnable(settings.model, settings.load_format).revision


async def test_a_host_waits_for_host_0_and_ends_with_it(two: WorkerSettings) -> None:
    async with running(two) as (made, run, _):
        await until(lambda: "cannot be joined: " in made.unready())
        assert f"host 0 at 127.0.0.1:{two.master_port}" in made.unready()
        first = HostListener(replace(two, node_rank=0, host="127.0.0.1"), revision_of(two))
        await asyncio.to_thread(first.meet)
        await until(lambda: made.state == "loading")
        first.ready = True
        await until(lambda: made.state == "ready")
        first.close()
        assert await asyncio.wait_for(run, 5.0) is False
        assert Ranks.made[0].closed


async def test_a_host_ends_if_host_0_does_not_answer(two: WorkerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "LEADER_S", 0.3)
    monkeypatch.setattr(HostListener, "_watch", lambda *_: None)
    first = HostListener(replace(two, node_rank=0, host="127.0.0.1"), revision_of(two))
    async with running(two) as (_, run, _):
        await asyncio.to_thread(first.meet)
        assert await asyncio.wait_for(run, 5.0) is False
        assert Ranks.made[0].closed
    first.close()


async def test_a_host_whose_rank_ends_says_so_and_ends(two: WorkerSettings) -> None:
    first = HostListener(replace(two, node_rank=0, host="127.0.0.1"), revision_of(two))
    async with running(two) as (made, run, _):
        await asyncio.to_thread(first.meet)
        await until(lambda: made.state == "loading")
        Ranks.made[0].ended = "rank 1 ended (signal 9)"
        assert await asyncio.wait_for(run, 5.0) is False
        await until(lambda: first.fault)
        assert first.fault == "host 1 (127.0.0.2) has ended: rank 1 ended (signal 9)"
    first.close()


async def test_a_host_that_is_asked_to_stop_computes_until_host_0_has_drained(two: WorkerSettings) -> None:
    first = HostListener(replace(two, node_rank=0, host="127.0.0.1"), revision_of(two))
    async with running(two) as (made, run, stop):
        await asyncio.to_thread(first.meet)
        first.ready = True
        await until(lambda: made.state == "ready")
        assert not first.leaving
        stop.handle(15)
        await until(lambda: first.leaving)
        assert not run.done()
        assert not first.fault
        first.close()
        assert await asyncio.wait_for(run, 5.0) is True


async def test_one_that_is_asked_to_stop_before_it_has_joined_ends(two: WorkerSettings) -> None:
    async with running(two) as (made, run, stop):
        await until(lambda: "cannot be joined" in made.unready())
        stop.handle(15)
        assert await asyncio.wait_for(run, 5.0) is True


async def test_a_host_with_other_weights_ends_at_once_and_names_them(two: WorkerSettings) -> None:
    first = HostListener(replace(two, node_rank=0, host="127.0.0.1"), REVISION)
    made = Follower(two)
    with pytest.raises(ConfigError, match="refuses this host: model revision differs"):
        await made.run(StopSignal())
    first.close()


async def test_a_host_does_not_wait_for_ever(two: WorkerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "JOIN_S", 0.1)
    with pytest.raises(ConfigError, match=r"after 0 s host 0 at .* cannot be joined") as raised:
        await Follower(two).run(StopSignal())
    assert raised.value.param == "master_addr"


@pytest.mark.parametrize(
    ("given", "param", "why"),
    [
        ({"node_rank": 2}, "node_rank", "--node-rank 2 must be below --nnodes 2"),
        ({"nnodes": 1, "node_rank": 1}, "node_rank", "--node-rank 1 must be below --nnodes 1"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "3 cannot be divided by --nnodes 2"),
        ({"master_addr": ""}, "master_addr", "--nnodes 2 needs --master-addr"),
        ({"master_addr": "10.0.0.1"}, "host", "--host 127.0.0.1 cannot be reached from other hosts"),
        (
            {"master_addr": "10.0.0.1", "host": "10.0.0.2", "cluster_secret": ""},
            "cluster_secret_file",
            "needs --cluster",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(path: Path, given: dict[str, Any], param: str, why: str) -> None:
    settings = hosts_of(path, 2)
    require_hosts(settings)
    require_hosts(replace(settings, master_addr="10.0.0.1", host="0.0.0.0", advertise_host="10.0.0.2"))
    with pytest.raises(ConfigError, match=why) as raised:
        require_hosts(replace(settings, **given))
    assert raised.value.param == param
