"""A router that starts while the registry is away serves with the nodes that it knew last."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.seal import Seal
from kvferry.model_files.model_name import ModelName
from kvferry.protocol.lease import IncompatibleLease, NodeLease
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.nodes import node_source
from kvferry.router.nodes.node_source import MAX_AGE_S, NAME, SAVE_S, LastNodes
from kvferry.router.request_context import RequestContext
from kvferry.runtime.private_files import write_whole
from tests.crowded import in_time
from tests.fake_workers import PROMPT, Bench, collect, decode, expected, ids, lease_of, prefill
from tests.waiting import until

D1, D2 = lease_of("d1", "decode"), lease_of("d2", "decode")
KEYS = Seal(lambda: (b"a key of thirty-two bytes, at all",))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Away:
    """Registry that does not answer until `leases` are set."""

    incompatible: tuple[IncompatibleLease, ...] = ()
    leases: list[NodeLease] | None = None

    async def nodes(self) -> list[NodeLease]:
        if self.leases is None:
            raise OSError("away")
        return self.leases


async def saved(nodes: LastNodes, *leases: NodeLease) -> None:
    nodes.save(leases)
    await nodes.close()


async def test_nodes_are_saved_when_they_change_and_every_ten_seconds(tmp_path: Path) -> None:
    clock = Clock()
    nodes, file = LastNodes(tmp_path / "c", clock=clock), tmp_path / "c" / NAME
    assert await nodes.load() == []
    await saved(nodes, D1)
    assert await LastNodes(tmp_path / "c").load() == [D1]
    assert file.stat().st_mode & 0o077 == 0
    first = file.stat().st_ino
    await saved(nodes, D1)
    assert file.stat().st_ino == first
    await saved(nodes)
    assert await nodes.load() == [D1], "an empty registry does not replace what was known"
    await saved(nodes, D1, D2)
    assert await nodes.load() == [D1, D2]
    clock.now += SAVE_S
    again = file.stat().st_ino
    await saved(nodes, D1, D2)
    assert file.stat().st_ino != again
    assert os.listdir(tmp_path / "c") == [NAME]


async def test_only_what_this_cluster_wrote_lately_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await saved(LastNodes(tmp_path, KEYS), D1)
    assert await LastNodes(tmp_path, KEYS).load() == [D1]
    assert await LastNodes(tmp_path, Seal(lambda: (b"another key",))).load() == []
    old = time.time() - MAX_AGE_S - 1
    os.utime(tmp_path / NAME, (old, old))
    assert await LastNodes(tmp_path, KEYS).load() == []
    for content in (b"", b"\xc1", b"\x91\x01", b"\x01"):
        (tmp_path / NAME).write_bytes(content)
        assert await LastNodes(tmp_path).load() == []
    assert "cannot be read" in caplog.text


async def test_parts_of_killed_routers_do_not_stay(tmp_path: Path) -> None:
    old = time.time() - MAX_AGE_S - 1
    for name, age in (("0a", old), ("1b", time.time())):
        (tmp_path / f"{NAME}.{name}.part").write_bytes(b"")
        os.utime(tmp_path / f"{NAME}.{name}.part", (age, age))
    await saved(LastNodes(tmp_path), D1)
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.1b.part"]


async def test_a_disk_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    nodes = LastNodes(tmp_path / "file")
    await saved(nodes, D1)
    assert await nodes.load() == []
    assert "are not saved" in caplog.text


async def test_one_of_several_processes_writes_and_all_read(tmp_path: Path) -> None:
    reads = LastNodes(tmp_path, writes=False)
    await saved(reads, D1)
    assert not (tmp_path / NAME).exists()
    await saved(LastNodes(tmp_path), D1)
    assert await reads.load() == [D1]


async def test_the_end_waits_for_a_save_but_not_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()

    def slow(path: Path, content: bytes) -> None:
        hangs.wait(30)
        write_whole(path, content)

    monkeypatch.setattr(node_source, "write_whole", slow)
    nodes = LastNodes(tmp_path)
    source = Away()
    source.leases = [D1]
    router = RouterCluster(source, MemoryStore(), RouterMetrics(), last=nodes)
    async with router:
        asyncio.get_running_loop().call_later(0.3, hangs.set)
    assert await nodes.load() == [D1], "the save had ended"
    hangs.clear()
    monkeypatch.setattr(node_source, "CLOSE_S", 0.1)
    nodes.save([D1, D2])
    began = time.monotonic()
    await nodes.close()
    assert in_time(time.monotonic() - began, 1)
    assert "the disk does not answer" in caplog.text
    hangs.set()


async def test_a_router_that_starts_without_the_registry_serves(tmp_path: Path) -> None:
    """With the nodes of the file that answer; once the registry does, those that it does not have are lost."""
    async with Bench([prefill(), decode()]) as bench:
        own = [worker.lease for worker in bench.workers.values()]
        await saved(LastNodes(tmp_path), *own, lease_of("d9", "decode"))
        source = Away()
        router = RouterCluster(source, bench.store, RouterMetrics(), last=LastNodes(tmp_path))
        cluster = router.pool(ModelName("m"))
        assert cluster.trouble()
        async with router:
            assert len(router.nodes.entries) == 3
            await until(lambda: not cluster.trouble())
            assert not router.nodes.registry_health.up
            now = time.monotonic()
            call = RequestContext("r", arrival=now, deadline=now + 60)
            dispatch = cluster.start(RequestSpec(call, "r", tuple(PROMPT), Generate(SamplingParams(max_tokens=8))))
            assert ids(await collect(dispatch)) == expected(PROMPT, 8)
            source.leases = own
            await until(lambda: router.nodes.registry_health.up and len(router.nodes.entries) == 2)


async def test_a_router_without_a_file_waits_for_the_registry(tmp_path: Path) -> None:
    source = Away()
    router = RouterCluster(source, MemoryStore(), RouterMetrics(), last=LastNodes(tmp_path))
    cluster = router.pool(ModelName("m"))
    async with router:
        assert cluster.trouble()
        source.leases = [D1]
        await until(lambda: not cluster.trouble())
        await until((tmp_path / NAME).exists)


async def test_a_disk_that_hangs_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(node_source, "write_whole", lambda *_: goes_on.wait(30))
    clock = Clock()
    nodes = LastNodes(tmp_path, clock=clock)
    nodes.save([D1])
    for _ in range(3):
        clock.now += SAVE_S
        nodes.save([D1])
    goes_on.set()
    await nodes.close()
    assert [record.message for record in caplog.records] == [
        "the last known nodes are not saved: the disk does not answer"
    ]
