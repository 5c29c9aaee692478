"""A node tells the index what it knows of the store that it shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.cluster_state import store_rows
from kvferry.cluster_state.index import ON_STORE, STORE_EPOCH
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.store_rows import StoreRows
from kvferry.protocol.index_rows import alone
from kvferry.protocol.layout import STORE_GROUP
from tests.waiting import until

CHAIN = [number.to_bytes(16, "little") for number in range(1, 4 * STORE_GROUP + 1)]
ENDS = [alone(each) for each in CHAIN[STORE_GROUP - 1 :: STORE_GROUP]]


class Index(MemoryStore):
    """Counts what it is told in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int]] = []

    async def publish(self, node_id: str, epoch: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        await super().publish(node_id, epoch, stored, removed)
        self.told.append((len(stored), len(removed)))

    async def groups(self) -> int:
        found = await self.longest_prefix(CHAIN, {ON_STORE: STORE_EPOCH})
        return found.get(ON_STORE, 0) // STORE_GROUP


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def rows(index: Index) -> StoreRows:
    return StoreRows(index, lambda: ENDS[:2])


async def test_the_last_word_of_a_group_counts(index: Index, rows: StoreRows) -> None:
    rows.note(ENDS, [])
    rows.note([], ENDS[2:])
    await rows.flush()
    assert (await index.groups(), index.told) == (2, [(2, 2)])
    rows.note(ENDS[2:3], ENDS[2:3])
    await rows.flush()
    assert (await index.groups(), rows.pending) == (3, 0)


async def test_many_go_in_batches(index: Index, rows: StoreRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_rows, "BATCH", 3)
    rows.note(ENDS, ())
    await rows.flush()
    assert index.told == [(3, 0), (1, 0)]


async def test_what_an_outage_kept_back_is_told_after_it_unless_it_is_no_longer_so(
    index: Index, rows: StoreRows
) -> None:
    index.available = False
    rows.note(ENDS, ())
    await rows.flush()
    assert rows.pending == 4
    rows.note((), ENDS[3:])
    await rows.flush()
    index.available = True
    await rows.flush()
    assert await index.groups() == 3


async def test_what_is_said_while_a_batch_is_written_in_vain_is_the_last_word(
    index: Index, rows: StoreRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*how: Any) -> None:
        rows.note((), ENDS)
        raise ValueError("of another kind")

    rows.note(ENDS, ())
    with monkeypatch.context() as patched:
        patched.setattr(index, "publish", fails)
        await rows.flush()
    await rows.flush()
    assert index.told[-1:] == [(0, 4)]


async def test_what_waits_is_bounded(index: Index, rows: StoreRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_rows, "MAX_WAITING", 2)
    index.available = False
    rows.note(ENDS[::-1], ())
    await rows.flush()
    assert rows.pending == 2
    index.available = True
    await rows.flush()
    assert await index.groups() == 2


async def test_rows_that_were_lost_are_written_again(index: Index, rows: StoreRows) -> None:
    rows.note(ENDS, ())
    await rows.flush()
    index.flush()
    rows.republish()
    await rows.flush()
    assert await index.groups() == 2


async def test_it_writes_by_itself_until_it_is_stopped(
    index: Index, rows: StoreRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_rows, "FLUSH_S", 0.01)
    await rows.start()
    rows.note(ENDS[:1], ())
    await until(lambda: index.told == [(1, 0)])
    rows.note(ENDS[1:2], ())
    await until(lambda: index.told == [(1, 0), (1, 0)])
    await rows.stop()
    rows.note(ENDS, ())
    assert rows.pending == 4


async def test_no_error_of_the_index_ends_it(index: Index, rows: StoreRows, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*how: Any) -> None:
        raise ValueError("of another kind")

    with monkeypatch.context() as patched:
        patched.setattr(index, "publish", fails)
        rows.note(ENDS, ())
        await rows.flush()
    await rows.flush()
    assert await index.groups() == 4
