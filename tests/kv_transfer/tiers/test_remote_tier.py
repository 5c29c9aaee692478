"""Blocks in a store that nodes share, over a real directory and over S3's protocol: what one wrote, another reads, and
nothing that is corrupt."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.kv_transfer.tiers import object_eviction, object_groups, remote
from kvferry.kv_transfer.tiers.object_groups import GROUP, Group, in_chain
from kvferry.kv_transfer.tiers.objects import Objects
from kvferry.kv_transfer.tiers.remote import RemoteTier
from kvferry.protocol.errors import BlocksCorrupt, ConfigError, KvferryError, NotFound, TransferFailed
from kvferry.protocol.index_rows import alone
from tests.kv_transfer.tiers.told import Overtaken
from tests.object_store import s3
from tests.waiting import wait_for

SIZE = 4096
BLOCKS = 3 * GROUP + 5


def named(count: int = BLOCKS, of: int = 0) -> list[bytes]:
    return [(of * 1000 + number).to_bytes(16, "little") for number in range(1, count + 1)]


def holding(count: int, first: int = 0) -> list[np.ndarray]:
    return [np.full(SIZE, number % 251, np.uint8) for number in range(first, first + count)]


class Node:
    """One of those that share it."""

    def __init__(self, address: str, size: int = 0, fingerprint: str = "model") -> None:
        self.tier = RemoteTier(Objects(address), size, fingerprint, SIZE)

    def write(self, hashes: list[bytes]) -> list[bool]:
        """Whether each group is there, once that is known."""
        there: list[bool] = []
        wanted = [group for group in self.groups(hashes) if not self.tier.has(group)]
        for group in wanted:
            copied = threading.Event()
            blocks = holding(GROUP, group.start)
            assert self.tier.write(group, blocks, copied.set, there.append)
            assert copied.wait(10)
            for block in blocks:
                block[:] = 255  # they are somebody else's by now
        wait_for(lambda: len(there) == len(wanted))
        return there

    def lookup(self, hashes: list[bytes], first: int = 0, patience_s: float = 10.0) -> int | None:
        """How many are there; None: it does not say."""
        found: list[int] = []
        if not self.tier.lookup(hashes, first, patience_s, found.append):
            return None
        wait_for(lambda: found)
        return found[0]

    def read(self, hashes: list[bytes], first: int = 0) -> KvferryError | None:
        into = [np.zeros(SIZE, np.uint8) for _ in hashes[first:]]
        ended: list[KvferryError | None] = []
        assert self.tier.read(hashes, first, into, ended.append)
        wait_for(lambda: ended)
        if ended[0] is None:
            assert [int(each[0]) for each in into] == [number % 251 for number in range(first, len(hashes))]
            assert all((each == each[0]).all() for each in into)
        return ended[0]

    def groups(self, hashes: list[bytes]) -> list[Group]:
        return list(in_chain(self.tier.folder, hashes))

    def names(self) -> list[str]:
        """Of all that is there."""
        return sorted(name for name, _, _ in asyncio.run(self.tier._objects.list(self.tier.folder)))


@pytest.fixture(params=["file", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/shared"
        return
    with s3(monkeypatch) as url:
        yield url


@pytest.fixture
def make(address: str) -> Iterator[Any]:
    made: list[Node] = []

    def make(**how: Any) -> Node:
        made.append(Node(address, **how))
        return made[-1]

    yield make
    for node in made:
        node.tier.close()


def test_what_one_node_wrote_another_reads_from_any_block_on(make: Any) -> None:
    one, other = make(), make()
    assert other.lookup(named()) == 0
    assert one.write(named()) == [True] * 3
    assert other.lookup(named()) == 3 * GROUP
    assert other.read(named(3 * GROUP)) is None
    assert other.lookup(named(), GROUP + 3) == 2 * GROUP - 3
    assert other.read(named(3 * GROUP), GROUP + 3) is None
    assert other.read(named(2 * GROUP), 2 * GROUP - 1) is None


def test_a_chain_that_has_no_whole_group_behind_what_is_here_is_not_looked_for(make: Any) -> None:
    node = make()
    node.write(named())
    assert node.lookup(named(GROUP - 1)) is None
    assert node.lookup(named(), 3 * GROUP) is None
    assert node.lookup(named(3 * GROUP), 3 * GROUP - 1) == 1


def test_a_gap_ends_what_is_there(make: Any) -> None:
    one, other = make(), make()
    one.write(named())
    asyncio.run(one.tier._objects.delete([one.groups(named())[1].name]))
    assert other.lookup(named()) == GROUP
    assert other.lookup(named(), GROUP) == 0
    assert isinstance(one.read(named(3 * GROUP)), NotFound)
    assert one.lookup(named()) == GROUP
    assert one.write(named()) == [True]
    assert other.lookup(named()) == 3 * GROUP


def test_another_model_s_and_another_chain_s_are_not_found(make: Any) -> None:
    make().write(named())
    assert make(fingerprint="another").lookup(named()) == 0
    assert make().lookup(named(of=7)) == 0


def test_what_another_node_wrote_is_not_written_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make(), make()
    one.write(named())
    put: list[str] = []
    really = Objects.put

    async def noted(self: Objects, name: str, content: bytes) -> None:
        put.append(name)
        await really(self, name, content)

    monkeypatch.setattr(Objects, "put", noted)
    assert other.write(named()) == [True] * 3
    assert not put
    assert other.write(named()) == []  # it knows
    monkeypatch.setattr(object_groups, "REWRITE_AGE_S", -1.0)
    monkeypatch.setattr(remote, "REWRITE_AGE_S", -1.0)
    assert other.write(named()) == [True] * 3
    assert len(put) == 3


@pytest.mark.parametrize("spoilt", ["block", "header", "length", "empty", "other"])
def test_what_is_not_as_it_was_written_is_not_read_and_not_found_again(make: Any, spoilt: str) -> None:
    one, other = make(), make()
    one.write(named())
    group = one.groups(named())[1]
    objects = one.tier._objects
    content = bytearray(asyncio.run(objects.get(group.name)))
    if spoilt == "block":
        content[-1] ^= 1
    elif spoilt == "header":
        content[20] ^= 1
    elif spoilt == "length":
        content = content[:-1]
    elif spoilt == "empty":
        content = bytearray()
    else:
        content = bytearray(asyncio.run(objects.get(one.groups(named())[0].name)))
    asyncio.run(objects.put(group.name, bytes(content)))
    assert isinstance(other.read(named(3 * GROUP)), BlocksCorrupt)
    assert not other.tier.unavailable
    assert other.lookup(named()) == GROUP
    assert group.name not in other.names()


def test_what_was_told_to_be_wrong_is_deleted_with_what_stands_behind_it(make: Any) -> None:
    one, other = make(), make()
    one.write(named())
    one.write(named(of=1))
    one.tier.drop([named()[GROUP + 2]])
    left = {one.groups(named())[0].name, *(group.name for group in one.groups(named(of=1)))}
    wait_for(lambda: set(one.names()) == left)
    assert other.lookup(named()) == one.lookup(named()) == GROUP
    assert one.write(named()) == [True] * 2
    assert other.lookup(named()) == 3 * GROUP


def test_what_is_told_to_be_wrong_while_it_is_written_does_not_stay(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node, go, under_way = make(), threading.Event(), threading.Event()
    really = Objects.put

    async def held(self: Objects, name: str, content: bytes) -> None:
        under_way.set()
        await asyncio.to_thread(go.wait, 20)
        await really(self, name, content)

    monkeypatch.setattr(Objects, "put", held)
    (group,) = node.groups(named(GROUP))
    there: list[bool] = []
    assert node.tier.write(group, holding(GROUP), lambda: None, there.append)
    assert under_way.wait(10)
    node.tier.drop([named()[3]])
    assert node.tier.has(group)  # the right one waits until the wrong one is gone
    go.set()
    wait_for(lambda: there)
    assert there == [False]
    assert node.names() == []
    assert node.write(named(GROUP)) == [True]
    assert node.lookup(named(GROUP)) == GROUP


def test_a_store_that_is_away_is_left_alone_for_a_while(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()
    node.write(named())

    async def fail(*what: Any) -> None:
        raise OSError("no route to it")

    for call in ("get", "age", "put"):
        monkeypatch.setattr(Objects, call, fail)
    error = node.read(named(3 * GROUP))
    assert isinstance(error, TransferFailed)
    assert "no route to it" in str(error)
    assert node.tier.unavailable
    assert node.lookup(named(of=2)) is None
    assert not node.tier.write(node.groups(named(of=3))[0], holding(GROUP), lambda: None, lambda there: None)
    monkeypatch.undo()
    monkeypatch.setattr(node.tier, "_unavailable_until", 0.0)
    assert node.tier.seconds(GROUP) == pytest.approx(GROUP * SIZE / remote.RATE, rel=0.5)
    assert node.tier._held == 0


@pytest.mark.parametrize("call", ["put", "delete"])
def test_a_store_that_takes_nothing_is_read(make: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It is full, or its keys may only read: else each new prompt would keep all others from what is there."""
    one, other = make(), make()
    one.write(named(2 * GROUP))
    spoilt = one.groups(named())[1].name
    asyncio.run(one.tier._objects.put(spoilt, b"wrong"))

    async def refuse(*what: Any) -> None:
        raise PermissionError("not yours to change")

    monkeypatch.setattr(Objects, call, refuse)
    (new,) = other.groups(named(GROUP, of=2))
    if call == "put":
        assert other.write(named(GROUP, of=2)) == [False]
    else:
        assert isinstance(other.read(named(2 * GROUP), GROUP), BlocksCorrupt)
    assert not other.tier.write(new, holding(GROUP), lambda: None, lambda _: None)
    assert not other.tier.unavailable
    assert other.lookup(named(GROUP)) == GROUP
    assert other.read(named(GROUP)) is None


def test_a_store_that_hangs_is_asked_no_longer_than_the_patience(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()

    async def hang(*what: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Objects, "age", hang)
    assert node.lookup(named(), patience_s=0.05) == 0
    monkeypatch.setattr(Objects, "get", hang)
    monkeypatch.setattr(remote, "CALL_S", 0.05)
    assert isinstance(node.read(named(GROUP)), TransferFailed)
    assert node.tier.unavailable


def test_no_more_waits_than_has_room(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()
    monkeypatch.setattr(remote, "HELD", GROUP * SIZE)
    go, there = threading.Event(), []

    async def held(*what: Any) -> None:
        await asyncio.to_thread(go.wait, 20)

    monkeypatch.setattr(Objects, "put", held)
    one, two, _ = node.groups(named())
    assert node.tier.write(one, holding(GROUP), lambda: None, there.append)
    assert not node.tier.write(two, holding(GROUP), lambda: None, there.append)
    assert not node.tier.has(two)
    go.set()
    wait_for(lambda: there == [True])
    wait_for(lambda: not node.tier._held)
    assert node.tier.write(two, holding(GROUP), lambda: None, there.append)


def test_what_was_written_longest_ago_leaves_first_and_of_a_chain_its_end(make: Any) -> None:
    node, hour = make(), object_eviction.AGE_S
    row = [(group.name, hour * 5 + index, 100) for index, group in enumerate(node.groups(named()))]
    older = [(group.name, hour * 2 + index, 100) for index, group in enumerate(node.groups(named(of=1)))]
    assert list(object_eviction.excess([*row, *older], 600)) == []
    assert list(object_eviction.excess([*row, *older], 590)) == [older[2][0]]
    assert list(object_eviction.excess([*row, *older], 200)) == [name for name, _, _ in (*older[::-1], *row[:0:-1])]
    node.write(named())
    one = asyncio.run(node.tier._objects.list(node.tier.folder))[0][2]
    assert asyncio.run(object_eviction.sweep(node.tier._objects, node.tier.folder, 2 * one)) == [row[2][0], row[1][0]]
    assert node.names() == [row[0][0]]


def test_one_node_sweeps_at_a_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()
    objects, folder = node.tier._objects, node.tier.folder
    assert asyncio.run(object_eviction._turn(objects, folder))
    assert not asyncio.run(object_eviction._turn(objects, folder))
    monkeypatch.setattr(object_eviction, "EVERY_S", -10.0)
    assert asyncio.run(object_eviction._turn(objects, folder))


def test_a_bound_is_kept_without_anybody_asking(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_eviction, "EVERY_S", 0.05)
    node = make(size=GROUP * SIZE * 2)
    node.write(named())
    wait_for(lambda: len([name for name in node.names() if name.endswith(object_groups.SUFFIX)]) == 1)


def told_by(node: Node) -> set[bytes]:
    """Groups that it tells are there, as of its last word."""
    there: set[bytes] = set()

    def changed(stored: Any, removed: Any) -> None:
        there.difference_update(removed)
        there.update(stored)

    node.tier.known.changed = changed
    return there


def test_what_is_known_to_be_there_is_told(make: Any) -> None:
    one, other = make(), make()
    of_one, of_other = told_by(one), told_by(other)
    ends = [alone(each) for each in named()[GROUP - 1 :: GROUP]]
    one.write(named())
    assert of_one == set(ends) == set(one.tier.known.rows())
    assert other.lookup(named()) == 3 * GROUP
    assert of_other == set(ends)
    asyncio.run(one.tier._objects.delete([one.groups(named())[1].name]))
    assert isinstance(one.read(named(3 * GROUP)), NotFound)
    assert of_one == {ends[0], ends[2]}
    one.tier.drop([named()[2]])
    assert of_one == set(one.tier.known.rows()) == {ends[2]}


def test_what_is_missed_or_deleted_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else routers would count on it for as long as its row lives."""
    node, stale = make(), make()
    there = told_by(stale)
    there.update(map(alone, named()[GROUP - 1 :: GROUP]))
    assert stale.lookup(named()) == 0
    assert alone(named()[GROUP - 1]) not in there
    node.write(named())
    monkeypatch.setattr(object_eviction, "EVERY_S", 0.05)
    sweeper = make(size=GROUP * SIZE * 2)
    there = told_by(sweeper)
    there.update(map(alone, named()[GROUP - 1 :: GROUP]))
    wait_for(lambda: there == {alone(named()[GROUP - 1])})


def test_what_is_told_last_is_how_it_is() -> None:
    """Else a row would tell of a group, for as long as it lives, that was said to be wrong as it was told of."""
    known = object_groups.Known()
    (group,) = in_chain("folder", named(GROUP))
    hearing = Overtaken(lambda: known.drop(named(1)))
    known.changed = hearing.changed
    known.begin(group)
    known.written(group)
    assert (hearing.ended(), known.rows()) == (["here", "gone"], [])


def test_what_begins_to_be_written_as_it_is_missed_stays_known() -> None:
    """Else nobody deletes it that is said to be wrong while it is written."""
    known = object_groups.Known()
    (group,) = in_chain("folder", named(GROUP))
    beginning = threading.Thread(target=lambda: known.begin(group))

    class Slow(OrderedDict[str, Any]):
        def get(self, name: str, *default: Any) -> Any:
            record = super().get(name, *default)
            if beginning.ident is None:
                beginning.start()
                beginning.join(0.2)  # it is behind this
            return record

    known._records = Slow()
    known.missing(group)
    beginning.join(10)
    known.drop(named(1))
    assert not known.written(group)


def test_a_read_ends_where_a_group_ends(make: Any) -> None:
    """Blocks that nothing brings would be taken for read."""
    node = make()
    with pytest.raises(AssertionError, match="must not end within a group"):
        node.read(named(2 * GROUP + 2), GROUP - 2)


def test_what_could_not_be_written_is_not_told_to_be_missing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may have written it."""
    node = make()
    told: list[Any] = []
    node.tier.known.changed = lambda stored, removed: told.append((stored, removed))

    async def fail(*what: Any) -> None:
        raise OSError("no route to it")

    monkeypatch.setattr(Objects, "age", fail)
    assert node.write(named(GROUP)) == [False]
    assert told == []


@pytest.mark.parametrize("name", ["swept", "folder/000001-nothing.kv", "folder/of-others"])
def test_what_is_no_groups_name_has_no_hash(name: str) -> None:
    assert object_groups.last_of(name) == b""
    (group,) = in_chain("folder", named(GROUP))
    assert object_groups.last_of(group.name) == group.hashes[-1]


@pytest.mark.parametrize("url", ["", "here", "/a/path", "ftp://host/a", "http://host/a", "s3:/one", "memory:///"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Objects(url)
    assert raised.value.param == "kv_remote_url"


def test_objects_that_a_node_met_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_groups, "KNOWN", 2)
    known, made = object_groups.Known(), list(in_chain("folder", named()))
    for group in made:
        known.found(group, 0.0)
    assert [known.exists(group) for group in made] == [False, True, True]
    monkeypatch.setattr(object_groups, "KNOWN_S", -1.0)
    assert not any(known.exists(group) or known.settled(group) for group in made)
