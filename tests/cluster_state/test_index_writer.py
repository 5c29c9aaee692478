"""IndexWriter alone: batches, order, coalescing, bounds, threads, refresh."""

import asyncio
import threading
import time

import pytest

from kvferry.cluster_state import own_rows
from kvferry.cluster_state.index_writer import IndexWriter
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.row_loss_detector import NEWEST, SAMPLE, RowLossDetector
from kvferry.protocol.index_rows import GROUP, alone, key_and_tag, rows_of
from tests.waiting import until


def _hashes(count: int, tag: int = 0) -> list[bytes]:
    return [bytes([tag, 0]) + i.to_bytes(14, "little") for i in range(count)]


def _rows(count: int, tag: int = 0) -> list[bytes]:
    return rows_of(_hashes(count, tag))


class _Recorder(MemoryStore):
    """Remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[bytes], list[bytes]]] = []
        self.refreshed: list[bytes] = []

    async def publish(self, node_id, epoch, stored, removed):
        self.calls.append((list(stored), list(removed)))
        await super().publish(node_id, epoch, stored, removed)

    async def refresh(self, node_id, epoch, rows):
        self._check_available()
        self.refreshed += rows
        await MemoryStore.publish(self, node_id, epoch, rows, ())


class _Writing:
    """A writer over a recorder, whose node starts out holding `held`."""

    def __init__(self, held: list[bytes] | None = None, **settings) -> None:
        self.store, self.held = _Recorder(), dict.fromkeys(held or [])
        self.writer = IndexWriter(self.store, "a", 1, lambda: list(self.held), **settings)

    def note(self, stored, removed=()) -> None:
        self.held.update(dict.fromkeys(stored))
        for row in removed:
            self.held.pop(row, None)
        self.writer.note(list(stored), list(removed))

    async def length(self, chain: list[bytes]) -> int:
        hashes = _hashes(len(chain), chain[0][1])
        assert chain == rows_of(hashes)
        return (await self.store.longest_prefix(hashes, {"a": 1})).get("a", 0)


@pytest.fixture
async def writing():
    """Past its first comparison with the (empty) snapshot."""
    w = _Writing(batch=10)
    await w.writer.flush()
    return w


async def test_writes_in_order_and_in_batches(writing):
    h = _rows(25)
    writing.note(h[:3])
    writing.note(h[3:])
    assert writing.writer.pending == 25
    assert await writing.writer.flush()
    assert writing.store.calls == [(h[:10], []), (h[10:20], []), (h[20:], [])]
    assert (writing.writer.rows, writing.writer.pending) == (25, 0)


async def test_removals_go_first(writing):
    h, other = _rows(4), _rows(12, 1)
    writing.note(h)
    await writing.writer.flush()
    writing.store.calls.clear()
    writing.note(other)
    writing.note([], h[2:][::-1])
    await writing.writer.flush()
    assert writing.store.calls == [(other[:8], h[2:][::-1]), (other[8:], [])]


async def test_stored_then_removed_is_never_written(writing):
    h = _rows(5)
    writing.note(h)
    writing.note([], h[::-1])
    await writing.writer.flush()
    assert writing.store.calls == []
    assert writing.writer.pending == 0


async def test_removed_then_stored_again_stays(writing):
    h = _rows(5)
    writing.note(h)
    await writing.writer.flush()
    writing.note([], h[::-1])
    writing.note(h)
    await writing.writer.flush()
    assert await writing.length(h) == 5


async def test_both_in_one_step_counts_as_removed_until_the_snapshot_tells(writing):
    h = _rows(3)
    writing.writer.note(h, h[2:])
    writing.held.update(dict.fromkeys(h))
    await writing.writer.flush()
    assert await writing.length(h) == 2
    writing.writer.republish()
    await writing.writer.flush()
    assert await writing.length(h) == 3


async def test_what_the_node_holds_at_the_start_is_written():
    h = _rows(7)
    w = _Writing(h)
    await w.writer.flush()
    assert await w.length(h) == 7


async def test_overflow_falls_back_to_the_snapshot():
    h, gone = _rows(300), _rows(20, 1)
    w = _Writing(gone, max_changes=100)
    await w.writer.flush()
    w.note([], gone)
    w.note(h[:90])
    assert w.writer.pending == 0
    w.note(h[90:])
    await w.writer.flush()
    assert await w.length(h) == 300
    assert await w.length(gone) == 0


async def test_an_outage_loses_no_removal_and_grows_no_memory():
    h, churn = _rows(50), _rows(400, 1)
    w = _Writing(h, batch=10)
    await w.writer.flush()
    w.store.available = False
    w.note([], h[45:][::-1])
    for start in range(0, 400, 8):
        w.note(churn[start : start + 8])
        assert not await w.writer.flush()
        w.note([], churn[start : start + 8][::-1])
        assert not await w.writer.flush()
    assert w.writer.pending <= 5 + 10
    w.note([], h[20:45][::-1])
    w.store.available = True
    assert await w.writer.flush()
    assert await w.writer.flush()
    assert await w.length(h) == 20
    assert (w.writer.rows, w.writer.pending) == (20, 0)


async def test_lost_data_is_written_again_after_an_outage(writing):
    h = _rows(30)
    writing.note(h)
    await writing.writer.flush()
    writing.store.available = False
    writing.note(_rows(1, 9))
    assert not await writing.writer.flush()
    writing.store.flush()
    writing.store.available = True
    for _ in range(2):
        await writing.writer.flush()
    assert await writing.length(h) == 30


async def test_an_addition_that_timed_out_but_lands_late_does_not_survive_its_removal(writing):
    """The server was frozen: the addition failed here, and took effect there after the removal did."""
    h = _rows(1)
    late: list[list[bytes]] = []
    real = writing.store.publish

    async def frozen(node_id, epoch, stored, removed):
        late.append(list(stored))
        raise TimeoutError

    async def thawed(node_id, epoch, stored, removed):
        await real(node_id, epoch, stored, removed)
        while late:
            await real(node_id, epoch, late.pop(), [])

    writing.store.publish = frozen
    writing.note(h)
    assert not await writing.writer.flush()
    writing.note([], h)
    writing.store.publish = thawed
    for _ in range(2):
        assert await writing.writer.flush()
    assert await writing.length(h) == 0


async def test_an_addition_that_failed_only_here_is_taken_back(writing):
    h = _rows(2)
    real = writing.store.publish

    async def answer_lost(node_id, epoch, stored, removed):
        await real(node_id, epoch, stored, removed)
        raise ConnectionResetError

    writing.store.publish = answer_lost
    writing.note(h)
    assert not await writing.writer.flush()
    writing.store.publish = real
    writing.note([], h[::-1])
    for _ in range(2):
        assert await writing.writer.flush()
    assert await writing.length(h) == 0


async def test_removed_stored_and_removed_between_two_flushes(writing):
    h = _rows(3)
    writing.note(h)
    await writing.writer.flush()
    for stored, removed in (([], h), (h, []), ([], h)):
        writing.note(stored, removed[::-1])
    await writing.writer.flush()
    assert await writing.length(h) == 0


async def test_a_removal_in_the_middle_of_writing_everything_again(writing):
    h = _rows(25)
    writing.note(h)
    await writing.writer.flush()
    writing.store.available = False
    writing.writer.republish()
    assert not await writing.writer.flush()
    writing.store.available = True
    writing.note([], h[::-1])
    for _ in range(2):
        assert await writing.writer.flush()
    assert await writing.length(h) == 0
    assert await writing.store.present("a", 1, h) == 0


async def test_refresh_writes_all_rows_again_slowly_and_repairs():
    h = _rows(40)
    w = _Writing(h, batch=10, flush_s=0.005, refresh_s=0.1)
    await w.writer.start()
    await asyncio.sleep(0.03)
    w.held.pop(h[-1])  # A removal that was never noted.
    async with asyncio.timeout(3):
        while len(w.store.refreshed) < 39:  # noqa: ASYNC110 (the writer's own rhythm)
            await asyncio.sleep(0.01)
    await w.writer.stop()
    assert set(w.store.refreshed) >= set(h[:-1])
    assert await w.length(h) == 39


async def test_a_refresh_that_fails_is_tried_again_and_does_not_slow_the_writer_for_ever():
    h = _rows(5)
    w = _Writing(h, flush_s=0.005, refresh_s=0.05)
    await w.writer.start()
    await asyncio.sleep(0.03)
    w.store.available = False
    await asyncio.sleep(0.1)
    w.store.available = True
    async with asyncio.timeout(3):
        while len(w.store.refreshed) < 5:  # noqa: ASYNC110 (the writer's own rhythm)
            await asyncio.sleep(0.01)
    assert w.writer._failures == 0
    await w.writer.stop()


async def test_the_writer_outlives_a_failing_snapshot():
    w = _Writing()
    w.writer._snapshot = lambda: _rows(1 // 0)
    assert not await w.writer.flush()
    w.writer._snapshot = lambda: _rows(4)
    for _ in range(2):
        await w.writer.flush()
    assert await w.length(_rows(4)) == 4


async def test_notes_from_another_thread_while_writing():
    h = _rows(3000)
    w = _Writing(flush_s=0.001, batch=50)
    await w.writer.start()

    def engine() -> None:
        for start in range(0, 3000, 3):
            w.note(h[start : start + 3])
            if start % 2:
                w.note([], h[start : start + 3][::-1])
                w.note(h[start : start + 3])

    thread = threading.Thread(target=engine)
    thread.start()
    async with asyncio.timeout(10):
        while thread.is_alive() or w.writer.pending or w.writer.rows < 3000:  # noqa: ASYNC110 (another thread's state)
            await asyncio.sleep(0.005)
    await w.writer.stop()
    assert await w.length(h) == 3000
    assert w.writer.rows == 3000


async def test_a_server_that_restarts_empty_is_filled_again(valkey, valkey_url):
    h = _rows(600)
    store = RedisStore(valkey_url, "test")
    writer = IndexWriter(store, "a", 1, lambda: h, flush_s=0.01)
    await writer.start()
    async with asyncio.timeout(5):
        while await store.longest_prefix(_hashes(600), {"a": 1}) != {"a": 600}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        valkey.terminate()
        writer.note(_rows(1, 7), [])
        await asyncio.sleep(0.05)
        valkey.start()
        while await store.longest_prefix(_hashes(600), {"a": 1}) != {"a": 600}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await writer.stop()
    await store.close()


async def test_rows_that_are_lost_while_the_node_lives_come_back_at_once():
    w = _Writing(_rows(40), batch=10, sample_s=0.05, flush_s=0.01)
    await w.writer.start()
    await until(lambda: w.writer.rows == 40)
    w.store.flush()
    began = time.monotonic()
    while await w.length(_rows(40)) < 40:
        assert time.monotonic() < began + 5
        await asyncio.sleep(0.01)
    w.store.refreshed.clear()
    await asyncio.sleep(0.3)
    assert w.store.refreshed == [], "nothing is written while nothing is lost"
    w.store.flush()
    await asyncio.sleep(0.3)
    assert w.store.refreshed == [], "a store that loses rows again and again is not flooded"
    await w.writer.stop()


class _Busy(_Writing):
    """Each write meets a node whose blocks have changed meanwhile."""

    def __init__(self, **settings) -> None:
        super().__init__(_rows(40), batch=10, flush_s=0.001, **settings)
        self.written = 0
        publish = self.store.publish

        async def published(*args):
            await publish(*args)
            await asyncio.sleep(0.001)
            self.written += 1
            self.note([alone((self.written * 10 + n).to_bytes(16, "little")) for n in range(10)])

        self.store.publish = published  # type: ignore[method-assign]


async def test_a_node_that_never_rests_has_its_rows_refreshed_and_its_losses_found():
    w = _Busy(refresh_s=0.2, sample_s=0.1)
    await w.writer.start()
    await until(lambda: w.written > 10)
    await until(lambda: set(_rows(40)) <= set(w.store.refreshed))
    w.store.refreshed.clear()
    w.store.flush()
    await until(lambda: w.store.refreshed != [])
    await w.writer.stop()


async def test_stop_waits_for_one_batch_and_not_for_what_keeps_coming():
    w = _Busy()
    await w.writer.start()
    await until(lambda: w.written > 3)
    before = w.written
    async with asyncio.timeout(2):
        await w.writer.stop()
    assert w.written <= before + 1


async def test_others_on_the_loop_have_their_turn_while_many_rows_are_compared_and_written_again():
    h = _rows(20 * own_rows.SLICE)
    w = _Writing(h, batch=256)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await w.writer._apply_changes()
    assert (turns >= 2 * 20, len(w.writer._rows.new)) == (True, len(h))
    turns = 0
    w.held = dict.fromkeys(h[: len(h) // 2])
    w.writer.republish()
    await w.writer._apply_changes()
    assert (turns >= 4 * 10, len(w.writer._rows.new), w.writer.rows) == (True, len(h) // 2, 0)
    other.cancel()


async def test_what_is_noted_while_rows_are_compared_counts():
    h = _rows(4 * own_rows.SLICE)
    w = _Writing(h)
    taking = asyncio.create_task(w.writer._apply_changes())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = _rows(1, 9)
    w.note(late, h[-1:])
    await taking
    await w.writer._apply_changes()
    assert set(w.writer._rows.held) == {*h[:-1], *late}


def test_what_is_looked_for_is_of_many_keys_and_the_newest_among_it():
    held = dict.fromkeys(_rows(1 + 40 * GROUP))
    sample = RowLossDetector(0.0).sample(held, ())
    assert len({key_and_tag(row)[0] for row in sample}) >= max(SAMPLE, NEWEST)
    assert list(held)[-1] in sample
    few = _rows(3)
    assert RowLossDetector(0.0).sample(dict.fromkeys(few), few[:1]) == few[-1:]


def test_rows_are_written_again_where_some_are_lost_and_not_again_at_once():
    losses = RowLossDetector(0.0)
    assert [losses.should_rewrite(found, 8) for found in (8, 7, 7)] == [False, True, False]
