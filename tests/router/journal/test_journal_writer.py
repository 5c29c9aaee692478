"""The writer of journals: few calls, whatever the number of streams, and nothing lost while the store is away."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from kvferry.cluster_state.journals import Append, AppendOutcome
from kvferry.cluster_state.memory_journals import MemoryJournals
from kvferry.protocol.journal_metrics import JournalMetrics
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.dispatch.interface import Output, Route
from kvferry.router.journal.open_journal import OWNER_CHECK_S, CloseMode, OpenJournal
from kvferry.router.journal.recording import JournalHead, Recording
from kvferry.router.journal.writer import WRITE_S, JournalWriter
from kvferry.router.request_context import RequestIdentity

HEAD = JournalHead("/v1/completions", b"{}", "r", RequestIdentity("ab", 12, 34), 600.0)


class CountedJournals(MemoryJournals):
    """Journals that count calls, and outcomes may be lost on the way back."""

    calls = 0
    drops_answers = False

    async def append(self, owner: str, appends: list[Append]) -> list[AppendOutcome]:
        self.calls += 1
        outcomes = await super().append(owner, appends)
        if self.drops_answers:
            self.available = False
            self._find("", "")
        return outcomes


class Bench:
    def __init__(self, max_bytes: int = 2**20) -> None:
        self.journals, self.metrics = CountedJournals(), JournalMetrics(CollectorRegistry())
        self.writer = JournalWriter(self.journals, "me", self.metrics, max_bytes=max_bytes)

    def begin(self, name: str, ttl_s: float = 60.0) -> OpenJournal:
        journal = OpenJournal("t", name, ttl_s, head=HEAD.packed())
        assert self.writer.begin(journal)
        return journal

    async def recorded(self, name: str) -> Recording:
        found = await self.journals.read("t", name)
        assert found is not None
        assert JournalHead.unpacked(found.head) == HEAD
        recording = Recording()
        recording.add(found.entries)
        return recording

    def failures(self, reason: str) -> float:
        return float(self.metrics.failures.labels(reason)._value.get())


async def test_what_was_taped_is_read_again() -> None:
    bench, journal = Bench(), None
    journal = bench.begin("a")
    route, logprobs = Route("p", None, Reuse(9, computed=9), late=True), (TokenLogprobs(7, -0.5, 1, ((7, -0.5),)),)
    journal.pending.note_prompts(b"digest")
    journal.pending.bind(1, route, "fp")
    for choice, output in (
        (0, Output((1, 2))), (1, Output((3,))), (0, Output((4,))), (0, Output((7,), logprobs)),
        (0, Output((5,))), (0, Output((6,), finish_reason="stop", stop_token=6)),
    ):  # fmt: skip
        journal.pending.add(choice, output)
    await bench.writer.flush()
    await bench.writer.flush()
    recording = await bench.recorded("a")
    first = recording.choices[0]
    assert first.token_ids == (1, 2, 4, 7, 5, 6)
    assert [each.token_ids for each in first.outputs] == [(1, 2, 4), (7,), (5,), (6,)]
    assert first.outputs[1].logprobs == logprobs
    assert (first.outputs[-1].finish_reason, first.outputs[-1].stop_token) == ("stop", 6)
    assert all(each.replayed for each in first.outputs)
    assert (recording.choices[1].route, recording.choices[1].fingerprint) == (route, "fp")
    assert (recording.prompts, recording.has_ended) == (b"digest", False)
    bench.writer.close(journal, CloseMode.END)
    await bench.writer.flush()
    assert (await bench.recorded("a")).has_ended
    assert not journal.is_open


async def test_all_streams_share_one_call_four_times_a_second() -> None:
    bench = Bench()
    async with bench.writer.running():
        journals = [bench.begin(f"s{number}") for number in range(50)]
        await asyncio.sleep(WRITE_S / 2)
        opened = bench.journals.calls
        assert opened <= 2
        for _ in range(20):
            for journal in journals:
                journal.pending.add(0, Output((1,)))
            await asyncio.sleep(WRITE_S / 10)
        assert bench.journals.calls - opened <= 4
        late = bench.begin("late")
        late.pending.add(0, Output((1,)))
        await asyncio.sleep(WRITE_S / 4)
        assert (await bench.recorded("late")).entries == 0, "its head hurries, alone"
    assert [(await bench.recorded(f"s{number}")).tokens for number in (0, 49)] == [20, 20]


async def test_an_answer_that_is_lost_on_its_way_repeats_the_same_entry() -> None:
    bench = Bench()
    journal = bench.begin("a")
    await bench.writer.flush()
    journal.pending.add(0, Output((1,)))
    bench.journals.drops_answers = True
    await bench.writer.flush()
    bench.journals.available, bench.journals.drops_answers = True, False
    journal.pending.add(0, Output((2,)))
    for _ in range(2):
        await bench.writer.flush()
    assert (await bench.recorded("a")).choices[0].token_ids == (1, 2)
    assert bench.failures("store") == 1


async def test_a_journal_of_another_owner_is_left_alone() -> None:
    bench, lost = Bench(), []
    journal = bench.begin("a")
    journal.on_lost = lambda: lost.append("a")
    await bench.writer.flush()
    await bench.journals.claim("t", "a", "other", ttl_s=9, by_force=True)
    journal.pending.add(0, Output((1,)))
    await bench.writer.flush()
    assert lost == ["a"]
    assert (await bench.recorded("a")).tokens == 0
    assert bench.metrics.open._value.get() == 0


async def test_a_quiet_journal_finds_out_too_and_lives_on() -> None:
    bench = Bench()
    quiet = bench.begin("quiet", ttl_s=0.6)
    watched = OpenJournal("t", "watched", 60.0, head=HEAD.packed(), watched=True)
    bench.writer.begin(watched)
    async with bench.writer.running():
        await asyncio.sleep(1.2)
        assert await bench.journals.read("t", "quiet") is not None, "no token came for twice its life"
        await bench.journals.claim("t", "quiet", "other", ttl_s=9, by_force=True)
        async with asyncio.timeout(1):
            await quiet.closed.wait()
        await bench.journals.claim("t", "watched", "other", ttl_s=9, by_force=True)
        async with asyncio.timeout(OWNER_CHECK_S + 2 * WRITE_S):
            await watched.closed.wait()


async def test_one_that_grows_too_large_is_deleted_and_counted() -> None:
    bench = Bench(max_bytes=400)
    journal = bench.begin("a")
    await bench.writer.flush()
    for _ in range(4):
        for _ in range(30):
            journal.pending.add(0, Output((100_000,)))
        await bench.writer.flush()
    assert await bench.journals.read("t", "a") is None
    assert bench.failures("too_large") == 1
    assert bench.metrics.open._value.get() == 0
    assert not bench.writer.begin(OpenJournal("t", "b", 9, head=b"x" * 401))


async def test_what_is_released_while_the_store_is_away_is_released_later() -> None:
    bench = Bench()
    journal = bench.begin("a")
    journal.pending.add(0, Output((1,)))
    await bench.writer.flush()
    bench.journals.available = False
    bench.writer.close(journal, CloseMode.RELEASE)
    for _ in range(3):
        await bench.writer.flush()
    bench.journals.available = True
    for _ in range(2):
        await bench.writer.flush()
    found = await bench.journals.read("t", "a")
    assert found is not None
    assert (found.owner, len(found.entries)) == ("", 1)
