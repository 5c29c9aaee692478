"""What router processes behind one port ask each other, and their metrics as one text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.worker_peers.exposition import merge, scraped
from kvferry.router.worker_peers.peers import WorkerPeers, call_peer, socket_path


async def test_a_question_gets_its_answer_and_who_is_not_there_gives_none(tmp_path: Path) -> None:
    one, other = [WorkerPeers(number, 3, str(tmp_path)) for number in range(2)]

    async def told(word: str, number: int) -> bytes:
        return f"{word} {number}".encode() * 100_000

    other.answers["told"] = told
    async with one.answering(), other.answering():
        assert await one.call("told", "x", 5) == {1: b"x 5" * 100_000, 2: None}
        assert await other.call("told", "x", 5) == {0: None, 2: None}, "it has no such answer"
        assert await one.silent() == [2]
    assert await one.call("alive") == {1: None, 2: None}


async def test_one_that_hangs_or_breaks_off_has_not_answered(tmp_path: Path) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = json.loads(await reader.readline())[0]
        writer.write(b"half an answer")
        if name == "hang":
            await asyncio.sleep(1)
        writer.close()

    async with await asyncio.start_unix_server(cut, socket_path(tmp_path, 0)):
        assert await call_peer(tmp_path, 0, "cut") is None
        assert await call_peer(tmp_path, 0, "hang", within_s=0.05) is None


async def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    socket_path(tmp_path, 0).touch()
    async with WorkerPeers(0, 2, str(tmp_path)).answering():
        assert await call_peer(tmp_path, 0, "alive") == b""


async def test_alone_it_listens_nowhere_and_asks_nobody() -> None:
    alone = WorkerPeers.of(RouterSettings())
    async with alone.answering():
        assert (alone.alone, await alone.call("alive")) == (True, {})
    metrics = RouterMetrics()
    assert b"worker=" not in await scraped(metrics, alone)


async def test_a_scrape_tells_of_each_process_and_of_who_is_missing(tmp_path: Path) -> None:
    own, other = RouterMetrics(), RouterMetrics()
    own.inflight.set(2)
    other.inflight.set(3)
    other.errors.labels("503", 'a "quoted" {code} x').inc()
    peers = [WorkerPeers(number, 3, str(tmp_path)) for number in range(2)]

    async def told() -> bytes:
        return await scraped(other, WorkerPeers())

    peers[1].answers["metrics"] = told
    async with peers[1].answering():
        text = (await scraped(own, peers[0])).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family is described once"
    inflight = families["kvferry_requests_inflight"].samples
    assert [(each.labels["worker"], each.value) for each in inflight] == [("0", 2), ("1", 3)]
    up = families["kvferry_worker_up"].samples
    assert [(each.labels["worker"], each.value) for each in up] == [("0", 1), ("1", 1), ("2", 0)]
    codes = [each for each in families["kvferry_error_answers"].samples if "quoted" in each.labels["code"]]
    assert [each.labels["worker"] for each in codes if each.name.endswith("_total")] == ["1"]


@pytest.mark.parametrize("sample", ["a 1.0", 'a{b="c"} 1.0', 'a{b="c d{e} f"} 1.0', 'a{b="\u2028\x85"} 1.0'])
def test_each_sample_gets_the_label(sample: str) -> None:
    (family,) = text_string_to_metric_families(f"# TYPE a gauge\n{sample}\n")
    labelled = merge({4: f"# TYPE a gauge\n{sample}\n"})
    again = next(iter(text_string_to_metric_families(labelled)))
    assert again.samples[0].labels == {**family.samples[0].labels, "worker": "4"}
