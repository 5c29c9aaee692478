"""The block index on Valkey and in memory: rows, epochs, longest prefixes."""

import asyncio
import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvferry.cluster_state.index import ON_STORE, STORE_EPOCH, on_tier
from kvferry.cluster_state.index_writer import IndexWriter
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.prefix_search import longest
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.index_rows import GROUP, alone, rows_of
from kvferry.protocol.layout import STORE_GROUP
from kvferry.protocol.lease import NodeLease

LEASE = NodeLease("a", "decode", 1, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)


def _hashes(count: int, tag: int = 0) -> list[bytes]:
    return [bytes([tag, 0]) + i.to_bytes(14, "little") for i in range(count)]


def _rows(count: int, tag: int = 0) -> list[bytes]:
    return rows_of(_hashes(count, tag))


@given(st.integers(0, 700), st.data())
@settings(max_examples=300)
def test_longest_finds_every_end_with_few_reads(count, data):
    end = data.draw(st.integers(0, count))
    reads = []

    def held(i: int) -> bool:
        assert 0 <= i < count
        reads.append(i)
        return i < end

    assert longest(count, held) == end
    assert len(reads) <= 2 * max(count, 1).bit_length() + 2


@given(st.lists(st.booleans(), max_size=200))
def test_longest_never_reports_an_end_it_did_not_see(rows):
    end = longest(len(rows), rows.__getitem__)
    assert end == 0 or (rows[0] and rows[end - 1])
    assert end == len(rows) or not rows[end]


async def test_prefix_lengths_per_node(store):
    h = _hashes(100)
    r = rows_of(h)
    await store.publish("a", 1, r[:37], [])
    await store.publish("b", 7, r, [])
    await store.publish("c", 3, r[1:], [])
    nodes = {"a": 1, "b": 7, "c": 3, "d": 9}
    assert await store.longest_prefix(h, nodes) == {"a": 37, "b": 100}
    assert await store.longest_prefix(h[:20], nodes) == {"a": 20, "b": 20}
    assert await store.present("c", 3, r) == 99
    assert await store.longest_prefix(h, {"a": 1}) == {"a": 37}
    assert await store.longest_prefix([], nodes) == {}
    assert await store.longest_prefix(h, {}) == {}


async def test_who_has_a_row_is_told_for_each(store):
    rows = rows_of(_hashes(40))
    await store.publish("a", 1, rows[:20], [])
    await store.publish("node ü:1", 7, rows[1:], [])
    nodes = {"a": 1, "node ü:1": 7, "c": 3}
    assert await store.holders([rows[0], rows[19], rows[20]], nodes) == [{"a"}, {"a", "node ü:1"}, {"node ü:1"}]
    assert await store.holders([rows[0], rows[39]], {"a": 2}) == [set(), set()]
    assert await store.holders([], nodes) == []
    assert await store.holders([rows[0]], {}) == [set()]


async def test_only_rows_of_the_live_epoch_count(store):
    h = _hashes(10)
    r = rows_of(h)
    await store.publish("a", 1, r, [])
    assert await store.longest_prefix(h, {"a": 2}) == {}
    await store.publish("a", 2, r[:4], [])
    assert await store.longest_prefix(h, {"a": 2}) == {"a": 4}
    await store.publish("a", 1, r[:8], r)
    assert await store.longest_prefix(h, {"a": 2}) == {"a": 4}
    assert await store.longest_prefix(h, {"a": 1}) == {}


async def test_a_registered_epoch_overwrites_newer_rows_of_a_clock_that_was_set_back(store):
    h = _hashes(4)
    r = rows_of(h)
    await store.publish("a", 9, r, [])
    await store.announce(replace(LEASE, epoch=3))
    await store.publish("a", 3, r[:2], [])
    assert await store.longest_prefix(h, {"a": 3}) == {"a": 2}
    await store.refresh("a", 3, r)
    assert await store.longest_prefix(h, {"a": 3}) == {"a": 4}


async def test_a_registered_epoch_takes_rows_of_others_out_and_one_that_is_not_leaves_them(store):
    h = _hashes(4)
    r = rows_of(h)
    await store.publish("a", 9, r, [])
    await store.publish("a", 3, [], r[2:])
    assert await store.present("a", 9, r) == 4, "nobody registered epoch 3"
    await store.announce(replace(LEASE, epoch=3))
    await store.publish("a", 3, [], r[2:])
    assert await store.present("a", 9, r) == 2
    await store.publish("a", 9, [], r[:1])
    assert await store.present("a", 9, r) == 1, "its own it may take out"
    await store.publish("b", 1, r, [])
    await store.publish("a", 3, [], r)
    assert await store.present("b", 1, r) == 4, "other nodes' rows stay"


async def test_rows_that_are_there_are_counted(store):
    h = _hashes(4)
    r = rows_of(h)
    await store.publish("a", 1, r[:3], [])
    await store.publish("b", 1, r, [])
    assert await store.present("a", 1, r) == 3
    assert await store.present("a", 2, r) == 0


async def test_epochs_of_microseconds_are_compared_exactly(store):
    h, epoch = _hashes(3), 1_790_000_000_000_001
    r = rows_of(h)
    await store.publish("a", epoch + 1, r, [])
    await store.publish("a", epoch, r, [])
    assert await store.longest_prefix(h, {"a": epoch + 1}) == {"a": 3}


async def test_removed_rows_are_gone_and_others_stay(store):
    h = _hashes(10)
    r = rows_of(h)
    await store.publish("a", 1, r, [])
    await store.publish("b", 1, r, [])
    await store.publish("a", 1, [], r[6:][::-1])
    assert await store.longest_prefix(h, {"a": 1, "b": 1}) == {"a": 6, "b": 10}
    await store.publish("a", 1, r[6:7], r[6:7])
    assert await store.longest_prefix(h, {"a": 1}) == {"a": 7}


async def test_hashes_of_all_byte_values(store):
    h = [bytes((i + j) % 256 for j in range(16)) for i in range(256)]
    r = rows_of(h)
    await store.publish("node ü:1", 1, r, [])
    assert await store.longest_prefix(h, {"node ü:1": 1}) == {"node ü:1": 256}


async def test_rows_expire_unless_one_of_their_key_is_written_again(store):
    h = _hashes(1 + 2 * GROUP + 1)
    r = rows_of(h)
    await store.publish("a", 1, r, [])
    await asyncio.sleep(0.6)
    await store.refresh("a", 1, r[:2])
    await asyncio.sleep(0.6)
    assert await store.longest_prefix(h, {"a": 1}) == {"a": 1 + GROUP}


async def test_refresh_drops_the_rows_of_dead_nodes_and_of_former_lives(store):
    h = _hashes(1 + 2 * GROUP)
    r = rows_of(h)
    await store.announce(replace(LEASE, node_id="b", epoch=3))
    await store.announce(replace(LEASE, node_id="c", epoch=3))
    await store.publish("dead", 1, r, [])
    await store.publish("b", 3, r, [])
    await store.publish("c", 2, r, [])
    await store.refresh("a", 1, r[: 1 + GROUP])
    kept = {"a": 1, "b": 3, "c": 2, "dead": 1}
    assert {name: await store.present(name, epoch, r[: 1 + GROUP]) for name, epoch in kept.items()} == {
        "a": 1 + GROUP,
        "b": 1 + GROUP,
        "c": 0,
        "dead": 0,
    }
    assert await store.present("dead", 1, r[1 + GROUP :]) == GROUP


async def test_what_is_on_disk_has_rows_of_its_own_which_live_by_the_lease_of_their_node(store):
    h = _hashes(4)
    r = rows_of(h)
    await store.announce(replace(LEASE, node_id="b", epoch=1))
    await store.publish("b", 1, r[:2], [])
    await store.publish(on_tier("b", "disk"), 1, r, [])
    await store.publish(on_tier("dead", "disk"), 1, r, [])
    nodes = {"b": 1, on_tier("b", "disk"): 1, on_tier("dead", "disk"): 1}
    assert await store.longest_prefix(h, nodes) == {"b": 2, on_tier("b", "disk"): 4, on_tier("dead", "disk"): 4}
    await store.refresh("a", 1, r)
    assert await store.longest_prefix(h, nodes) == {"b": 2, on_tier("b", "disk"): 4}
    await store.publish(on_tier("b", "disk"), 9, r, [])
    await store.publish(on_tier("b", "disk"), 1, r, [])
    assert await store.longest_prefix(h, nodes) == {"b": 2, on_tier("b", "disk"): 4}
    await store.publish("b", 1, [], r[:2])
    assert await store.longest_prefix(h, nodes) == {on_tier("b", "disk"): 4}


async def test_what_a_store_has_is_told_in_whole_groups_and_lives_by_nobodys_lease(store):
    h = _hashes(5 * STORE_GROUP + 3)
    r = rows_of(h)
    ends = [alone(each) for each in h[STORE_GROUP - 1 :: STORE_GROUP]]
    await store.announce(replace(LEASE, node_id="b", epoch=7))
    await store.publish("b", 7, r[:20], [])
    await store.publish(ON_STORE, STORE_EPOCH, ends[:3], [])
    nodes = {"b": 7, ON_STORE: STORE_EPOCH}
    assert await store.longest_prefix(h, nodes) == {"b": 20, ON_STORE: 3 * STORE_GROUP}
    assert await store.longest_prefix(h, {"b": 7}) == {"b": 20}
    assert await store.longest_prefix(h[: 2 * STORE_GROUP + 9], nodes) == {"b": 20, ON_STORE: 2 * STORE_GROUP}
    assert await store.longest_prefix(h[: STORE_GROUP - 1], nodes) == {"b": STORE_GROUP - 1}
    await store.refresh("b", 7, r[:20])
    await store.publish(ON_STORE, STORE_EPOCH, ends[3:], [])
    assert await store.longest_prefix(h, nodes) == {"b": 20, ON_STORE: 5 * STORE_GROUP}
    await store.withdraw("b", 7)
    await store.publish(ON_STORE, STORE_EPOCH, [], ends[1:])
    assert await store.longest_prefix(h, nodes) == {"b": 20, ON_STORE: STORE_GROUP}
    await store.publish(ON_STORE, STORE_EPOCH, [], ends)
    assert await store.longest_prefix(h, nodes) == {"b": 20}
    assert await store.longest_prefix(_hashes(40, tag=9), nodes) == {}


class _Node:
    """The model: chains of blocks, dropped leaf first."""

    def __init__(self, node_id: str) -> None:
        self.node_id, self.epoch = node_id, 1
        self.held: dict[int, int] = {}
        self.order: dict[bytes, None] = {}

    def grow(self, chain: int, length: int) -> list[bytes]:
        new = _rows(length, chain)[self.held.get(chain, 0) :]
        self.held[chain] = max(length, self.held.get(chain, 0))
        self.order.update(dict.fromkeys(new))
        return new

    def shrink(self, chain: int, length: int) -> list[bytes]:
        had = self.held.get(chain, 0)
        self.held[chain] = min(length, had)
        gone = _rows(had, chain)[self.held[chain] :][::-1]
        for row in gone:
            del self.order[row]
        return gone


class _IndexMachine(RuleBasedStateMachine):
    """Three nodes with writers on one store; crashes, evictions, outages and data losses, against the model."""

    make_store = staticmethod(MemoryStore)
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {name: _Node(name) for name in "abc"}
        self.writers: dict[str, IndexWriter] = {}

    @initialize()
    def begin(self) -> None:
        self.store = self.make_store()
        self._do(self._flush_all())
        for name in self.nodes:
            self._new_writer(name)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self._up()
            self._do(self.store.close())

    def _do(self, coroutine):
        return self.runner.run(coroutine)

    async def _flush_all(self) -> None:
        if isinstance(self.store, MemoryStore):
            self.store.flush()
        else:
            await self.store._client.flushall()

    def _new_writer(self, name: str) -> None:
        node = self.nodes[name]
        self.writers[name] = IndexWriter(
            self.store, name, node.epoch, lambda: list(node.order), batch=5, max_changes=40
        )

    def _up(self) -> None:
        self.store.__dict__.pop("publish", None)
        self.store.__dict__.pop("refresh", None)

    @rule(name=st.sampled_from("abc"), chain=st.integers(0, 2), length=st.integers(1, 30))
    def store_blocks(self, name, chain, length):
        self.writers[name].note(self.nodes[name].grow(chain, length), [])

    @rule(name=st.sampled_from("abc"), chain=st.integers(0, 2), length=st.integers(0, 30))
    def drop_blocks(self, name, chain, length):
        self.writers[name].note([], self.nodes[name].shrink(chain, length))

    @rule(name=st.sampled_from("abc"), chain=st.integers(0, 2), keep=st.integers(0, 30), length=st.integers(1, 30))
    def drop_and_grow_another_in_one_step(self, name, chain, keep, length):
        node = self.nodes[name]
        removed = node.shrink(chain, keep)
        self.writers[name].note(node.grow((chain + 1) % 3, length), removed)

    @rule(name=st.sampled_from("abc"))
    def flush(self, name):
        self._do(self.writers[name].flush())

    @rule(name=st.sampled_from("abc"))
    def crash(self, name):
        node = self.nodes[name]
        node.epoch, node.held, node.order = node.epoch + 1, {}, {}
        self._new_writer(name)

    @rule(after=st.booleans(), seed=st.integers(0, 1000))
    def outage_begins(self, after, seed):
        """Writes fail; where `after`, some of them only after they took effect."""
        real, dice = type(self.store).publish, random.Random(seed)

        async def broken(node_id, epoch, stored, removed):
            if after and dice.random() < 0.5:
                await real(self.store, node_id, epoch, stored, removed)
            raise RegistryUnavailable("off")

        self.store.publish = broken  # type: ignore[method-assign]

    @rule()
    def outage_ends(self):
        self._up()

    @precondition(lambda self: "publish" not in self.store.__dict__)
    @rule()
    def data_is_lost_and_noticed(self):
        self._do(self._flush_all())
        for writer in self.writers.values():
            writer.republish()

    @rule()
    def settle_and_compare(self):
        self._up()
        for writer in self.writers.values():
            assert self._do(writer.flush())
            assert self._do(writer.flush())  # The first one only noticed that an outage is over.
            assert writer.pending == 0
        epochs = {name: node.epoch for name, node in self.nodes.items()}
        for chain in range(3):
            expected = {n: node.held[chain] for n, node in self.nodes.items() if node.held.get(chain)}
            assert self._do(self.store.longest_prefix(_hashes(40, chain), epochs)) == expected
        for name, writer in self.writers.items():
            assert writer.rows == len(self.nodes[name].order)


def _run_machine(make_store, examples: int) -> None:
    with asyncio.Runner() as runner:
        machine = type("Machine", (_IndexMachine,), {"make_store": staticmethod(make_store), "runner": runner})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )


def test_index_and_writer_equal_the_model_in_memory():
    _run_machine(MemoryStore, 150)


def test_index_and_writer_equal_the_model_on_valkey(valkey_url):
    _run_machine(lambda: RedisStore(valkey_url, "test"), 40)


def test_a_hundred_thousand_tokens_take_less_than_twenty_questions():
    count = 100_000 // 16
    for end in range(count + 1):
        asked = []
        assert longest(count, lambda i, end=end, asked=asked: asked.append(i) or i < end) == end
        assert len(asked) <= 19
