"""CacheMirror: an engine's events become kvferry's rows, and nothing outlives the engine's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster_state.index_writer import IndexWriter
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.engine_adapter.cache_mirror import HELD_SLICE, MAX_OVERCOUNT, CacheMirror
from kvferry.engine_adapter.cached_blocks import CachedBlocks
from kvferry.engine_adapter.kv_event_batch import decode
from kvferry.engine_adapter.mirroring import MAX_CALLS, MISSES, MirrorAccuracy
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.media import MediaItem, block_extras
from tests.engine_adapter.mock_kv_events import pack
from tests.engine_adapter.model_cache import ModelCache

SIZE, PRINT = 4, "fingerprint"


class Mirrored:
    """A mirror whose notes are applied to `noted`, the rows that the index would have."""

    def __init__(self, **settings: Any) -> None:
        self.noted: dict[bytes, None] = {}
        self.notes = 0
        adapters = {"lora": "lora-id"}
        self.mirror = CacheMirror(PRINT, SIZE, adapter_id=adapters.get, note=self._note, **settings)

    def _note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.notes += 1
        assert not set(stored) & set(removed)
        for row in removed:
            del self.noted[row]
        for row in stored:
            assert row not in self.noted
            self.noted[row] = None

    def take(self, *events: dict[str, Any]) -> None:
        self.mirror.take(decode(pack(events)))
        assert self.mirror.rows() == list(self.noted)

    def hold(self, *sequences: list[bytes]) -> None:
        assert set(self.noted) == {row for rows in sequences for row in rows}


def rows(tokens: Sequence[int], salt: str = "", adapter: str = "") -> list[bytes]:
    return rows_of(chain(root_hash(PRINT, salt, adapter), tokens, SIZE))


def stored(keys: list[int | bytes], tokens: Sequence[int], parent: int | bytes | None = None, **fields: Any) -> dict:
    return {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": parent, "token_ids": list(tokens),
            "block_size": SIZE, "medium": "GPU", "group_idx": 0, **fields}  # fmt: skip


def removed(*keys: int | bytes, **fields: Any) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU", "group_idx": 0, **fields}


CLEARED = {"type": "AllBlocksCleared"}
TEXT = list(range(100, 180))


def test_rows_are_those_of_a_router():
    engine = Mirrored()
    engine.take(stored([1, 2, 3], TEXT[:12]), stored([b"four"], TEXT[12:16], 3))
    assert list(engine.noted) == rows(TEXT[:16])
    engine.take(removed(b"four"), removed(3))
    engine.hold(rows(TEXT[:8]))
    assert engine.mirror.blocks == 2
    engine.take(CLEARED)
    engine.hold()
    assert engine.mirror.blocks == 0


def test_long_chains_share_keys_as_a_router_expects():
    engine, tokens = Mirrored(), list(range(SIZE * 70))
    for at in range(70):
        engine.take(stored([at], tokens[at * SIZE : (at + 1) * SIZE], at - 1 if at else None))
    assert list(engine.noted) == rows(tokens)


def test_copies_are_counted():
    engine = Mirrored()
    for _ in range(3):
        engine.take(stored([1, 2], TEXT[:8]))
    engine.take(removed(2), removed(2), removed(1))
    engine.hold(rows(TEXT[:8]))
    engine.take(removed(2))
    engine.hold(rows(TEXT[:4]))
    engine.take(removed(1), removed(1), removed(1))
    engine.hold()
    assert engine.mirror.skipped["unknown"] == 1


def test_an_engine_without_copies_tells_a_block_twice():
    engine = Mirrored(counts_copies=False)
    engine.take(stored([1, 2], TEXT[:8]), stored([1, 2], TEXT[:8]))
    engine.take(removed(1, 2))
    engine.hold()


def test_a_row_goes_with_all_rows_behind_it_and_comes_back_with_it():
    engine = Mirrored()
    engine.take(stored([1, 2, 3], TEXT[:12]), stored([4], TEXT[20:24], 2), stored([5], TEXT[24:28], 4))
    side = [*TEXT[:8], *TEXT[20:28]]
    engine.hold(rows(TEXT[:12]), rows(side))
    engine.take(removed(2))
    engine.hold(rows(TEXT[:4]))
    assert engine.mirror.blocks == 4
    engine.take(removed(4))
    engine.take(stored([2], TEXT[4:8], 1))
    engine.hold(rows(TEXT[:12]))
    engine.take(stored([4], TEXT[20:24], 2))
    engine.hold(rows(TEXT[:12]), rows(side))


def test_rows_behind_a_block_go_before_it():
    """A reader of the index in between takes a row as a sign of all rows before it."""
    order: list[bytes] = []
    mirror = CacheMirror(PRINT, SIZE, note=lambda stored, removed: order.extend(removed))
    mirror.take(decode(pack([stored([1, 2, 3], TEXT[:12])])))
    mirror.take(decode(pack([removed(1)])))
    mirror.take(decode(pack([stored([1], TEXT[:4])])))
    mirror.forget()
    assert order == [*reversed(rows(TEXT[:12])), *reversed(rows(TEXT[:12]))]


def test_changes_of_one_batch_cancel_out():
    engine = Mirrored()
    engine.take(stored([1], TEXT[:4]), removed(1), stored([1, 2], TEXT[:8]), removed(2))
    engine.hold(rows(TEXT[:4]))
    engine.take(removed(1), stored([1], TEXT[:4]))
    assert engine.notes == 1


def test_blocks_whose_parent_is_unknown_wait_for_it():
    engine = Mirrored()
    engine.take(stored([3, 4], TEXT[8:16], 2), stored([5], TEXT[16:20], 4), stored([9], TEXT[:4], 8))
    engine.hold()
    engine.take(stored([2], TEXT[4:8], 1), removed(5))
    engine.hold()
    engine.take(stored([1], TEXT[:4]))
    engine.hold(rows(TEXT[:16]))


@pytest.mark.parametrize(
    ("salted", "salt"),
    [({"extra_keys": [["tenant"], None]}, "tenant"), ({"cache_salt": "tenant"}, "tenant"), ({"extra_keys": None}, "")],
)
def test_namespaces_of_tenants_are_salts(salted, salt):
    engine = Mirrored()
    engine.take(stored([1, 2], TEXT[:8], **salted))
    engine.take(stored([3], TEXT[8:12], 2))
    assert list(engine.noted) == rows(TEXT[:12], salt)
    other = "" if salt else "tenant"
    assert engine.mirror.held([*TEXT[:12], 7], salt) == 12
    assert engine.mirror.held([*TEXT[:12], 7], other) == 0


@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({"lora_name": "lora", "extra_keys": [["lora"], ["lora"]]}, ""),
        ({"lora_name": "lora", "extra_keys": [["lora", "tenant"], ["lora"]]}, "tenant"),
        ({"lora_name": "lora", "extra_keys": [["lora", "lora"], ["lora"]]}, "lora"),
        ({"lora_name": "lora", "cache_salt": "tenant"}, "tenant"),
    ],
)
def test_adapters_have_chains_of_their_own(fields, salt):
    engine = Mirrored()
    engine.take(stored([1, 2], TEXT[:8], **fields))
    assert list(engine.noted) == rows(TEXT[:8], salt, "lora-id")


def test_adapters_that_routers_do_not_know_are_skipped():
    engine = Mirrored()
    engine.take(stored([1], TEXT[:4], lora_name="other"), stored([2], TEXT[:4], lora_id=3, lora_name=None))
    engine.hold()
    assert engine.mirror.skipped["adapter"] == 2


@pytest.mark.parametrize(
    "keys", [[None, [["image", "3"]], None], [None, ["tenant"], None], [None, [b"embeds"], None], [None, [1], None]]
)
def test_blocks_that_depend_on_more_than_tokens_are_not_told(keys):
    engine = Mirrored()
    engine.take(stored([1, 2, 3], TEXT[:12], extra_keys=keys), stored([4], TEXT[12:16], 3))
    engine.hold(rows(TEXT[:4]))
    assert engine.mirror.skipped["extra_keys"] == 2
    engine.take(stored([5], TEXT[:4], extra_keys=[["tenant", ["image", 0]]]))
    engine.hold(rows(TEXT[:4]))


def media_rows(tokens: Sequence[int], *media: tuple[str, int, int], salt: str = "", adapter: str = "") -> list[bytes]:
    """Rows of a router for a prompt with these images: hash, offset and length of each."""
    items = [MediaItem("image", name, at, length, b"") for name, at, length in media]
    return rows_of(chain(root_hash(PRINT, salt, adapter), tokens, SIZE, extras=block_extras(items, SIZE)))


def test_blocks_with_images_have_the_rows_of_a_router():
    engine = Mirrored()
    keys = [["tenant"], [["one", 1]], [["one", -3], ["two", 2]], [["two", -2]], None]
    engine.take(stored([1, 2, 3, 4, 5], TEXT[:20], extra_keys=keys))
    engine.hold(media_rows(TEXT[:20], ("one", 5, 5), ("two", 10, 4), salt="tenant"))
    assert not engine.mirror.skipped


def test_a_first_block_may_have_adapter_image_and_salt():
    engine = Mirrored()
    engine.take(stored([1], TEXT[:4], lora_name="lora", extra_keys=[["lora", ["one", 0], "tenant"]]))
    engine.hold(media_rows(TEXT[:4], ("one", 0, 4), salt="tenant", adapter="lora-id"))


def test_a_block_with_an_image_that_waits_for_its_parent_gets_the_same_row():
    engine = Mirrored()
    engine.take(stored([2], TEXT[4:8], 1, extra_keys=[[["one", 0]]]))
    engine.hold()
    engine.take(stored([1], TEXT[:4]))
    engine.hold(media_rows(TEXT[:8], ("one", 4, 4)))


def test_reuse_is_foretold_for_the_same_image_alone():
    engine, cache = Mirrored(), ModelCache(100, SIZE)
    tokens, media = TEXT * 4, [("one", 6, 9), ("in the second slice", 4 * HELD_SLICE + 2, 3)]
    cache.run(tokens, "tenant", "lora", media)
    engine.take(*cache.take())
    same = [MediaItem("image", name, at, length, b"") for name, at, length in media]
    other = [MediaItem("image", "two", 6, 9, b""), same[1]]
    later = [same[0], MediaItem("image", "else", 4 * HELD_SLICE + 2, 3, b"")]
    assert engine.mirror.held(tokens, "tenant", "lora-id", same) == len(tokens) - SIZE
    assert engine.mirror.held(tokens, "tenant", "lora-id", other) == 4
    assert engine.mirror.held(tokens, "tenant", "lora-id") == 4
    assert engine.mirror.held(tokens, "tenant", "lora-id", later) == 4 * HELD_SLICE
    assert engine.mirror.held(tokens, "", "lora-id", same) == 0


@pytest.mark.parametrize(
    ("reason", "event"),
    [
        ("group", stored([1], TEXT[:4], group_idx=1)),
        ("group", stored([1], TEXT[:4], kv_cache_spec_kind="sliding_window")),
        ("medium", stored([1], TEXT[:4], medium="CPU")),
        ("block_size", stored([1], TEXT[:3], block_size=3)),
        ("shape", stored([1], TEXT[:8])),
        ("shape", stored([1], TEXT[:3])),
        ("shape", stored([1, 2], TEXT[:4])),
    ],
)
def test_other_blocks_are_skipped_by_reason(reason, event):
    engine = Mirrored()
    engine.take(stored([2], TEXT[:4], kv_cache_spec_kind="full_attention"), event)
    engine.hold(rows(TEXT[:4]))
    assert engine.mirror.skipped == {reason: len(event["block_hashes"])}
    engine.take(removed(2, group_idx=1), removed(2, medium="CPU_PINNED"))
    engine.hold(rows(TEXT[:4]))


def test_more_copies_than_an_engine_has_blocks_are_a_wrong_count():
    """An engine can be asked to announce blocks again that it reuses; nothing removes those."""
    engine = Mirrored(total_blocks=10)
    for _ in range(10 * MAX_OVERCOUNT):
        engine.take(stored([1], TEXT[:4]))
    engine.hold(rows(TEXT[:4]))
    engine.take(stored([1], TEXT[:4]))
    engine.hold()
    assert engine.mirror.blocks == 0
    engine.take(stored([2], TEXT[:4]))
    engine.hold(rows(TEXT[:4]))


def test_held_is_what_an_engine_can_reuse():
    engine, tokens = Mirrored(), list(range(SIZE * (HELD_SLICE * 2 + 3)))
    engine.take(stored(list(range(1, len(tokens) // SIZE + 1)), tokens))
    mirror = engine.mirror
    assert mirror.held([]) == mirror.held([0]) == mirror.held(tokens[:SIZE]) == 0
    assert mirror.held(tokens[: SIZE + 1]) == SIZE
    assert mirror.held(tokens) == len(tokens) - SIZE
    assert mirror.held([*tokens, 1]) == len(tokens)
    for blocks in (1, HELD_SLICE - 1, HELD_SLICE, HELD_SLICE + 1):
        assert mirror.held([*tokens[: blocks * SIZE], *([7] * 20)]) == blocks * SIZE
    engine.take(removed(HELD_SLICE))
    assert mirror.held(tokens) == (HELD_SLICE - 1) * SIZE


def test_a_mirror_is_stale_once_the_engine_reuses_nothing_of_it_time_and_again():
    engine = Mirrored()
    engine.take(stored([1, 2], TEXT[:8]))
    accuracy = MirrorAccuracy(engine.mirror)
    for call in range(MISSES - 1):
        accuracy.sent(call, TEXT[:12])
        accuracy.ended(call, 0)
    accuracy.sent("new", (9,) * 12)  # of a prompt that the mirror does not hold, nothing can be missed
    accuracy.ended("new", 0)
    assert not accuracy.is_stale
    accuracy.sent("last", TEXT[:12])
    accuracy.ended("last", 0)
    assert accuracy.is_stale


def test_a_miss_that_the_engine_explained_and_a_hit_make_no_mirror_stale():
    engine = Mirrored()
    accuracy = MirrorAccuracy(engine.mirror)
    for call in range(2 * MISSES):
        engine.take(stored([1, 2], TEXT[:8]))
        accuracy.sent(call, TEXT[:12])
        engine.take({"type": "AllBlocksCleared"})
        accuracy.ended(call, 0)
    engine.take(stored([1, 2], TEXT[:8]))
    for call in range(2 * MISSES):
        accuracy.sent(call, TEXT[:12])
        accuracy.ended(call, 8 if call % 2 else 0)
    assert not accuracy.is_stale


def test_accuracy_compares_prediction_and_account():
    engine = Mirrored()
    engine.take(stored([1, 2], TEXT[:8]))
    accuracy = MirrorAccuracy(engine.mirror)
    assert accuracy.sent("a", TEXT[:12]) == 8
    assert accuracy.sent("b", TEXT[:8]) == 4
    accuracy.sent("c", TEXT[:8])
    accuracy.ended("a", 8)
    accuracy.ended("b", 0)
    accuracy.ended("c", None)
    accuracy.ended("unknown", 100)
    assert (accuracy.calls, accuracy.predicted, accuracy.actual, accuracy.difference) == (2, 12, 8, 4)
    for call in range(MAX_CALLS + 1):
        accuracy.sent(call, TEXT[:1])
    accuracy.ended(0, 5)
    assert accuracy.calls == 2


def test_two_engine_hashes_of_one_chain_are_one_row():
    """As when a LoRA adapter is loaded again from another path: the engine hashes that, a router does not."""
    engine = Mirrored()
    engine.take(stored([1, 2], TEXT[:8]), stored([11, 12], TEXT[:8]))
    engine.take(removed(2), removed(1))
    engine.hold(rows(TEXT[:8]))
    engine.take(removed(11))
    engine.hold()


KEYS = st.integers(0, 6)


@given(
    st.lists(
        st.tuples(st.lists(KEYS, max_size=3), st.none() | KEYS, st.integers(0, 1))
        | KEYS.map(lambda key: (key,))
        | st.just(()),
        max_size=25,
    )
)
def test_no_order_of_events_breaks_the_books(steps):
    """Also one that no engine sends: keys with two parents, circles, keys twice in one event."""
    cached = CachedBlocks(SIZE)
    told: dict[bytes, None] = {}
    for step in steps:
        if len(step) == 3:
            keys, parent, first = step
            cached.store(keys, parent, decode_tokens(first, len(keys)), b"root" if parent is None else b"")
        elif step:
            cached.remove(step[0])
        else:
            cached.clear()
            assert len(cached) == cached.copies == 0
        added, gone = cached.changes()
        for row in gone:
            del told[row]
        told.update(dict.fromkeys(added))
        assert set(told) == set(cached.rows)
        assert cached.copies >= len(cached)
    for key in range(7):
        while cached.remove(key):
            pass
    assert cached.rows == {}
    assert cached._behind == {}


def decode_tokens(first: int, blocks: int) -> Any:
    (event,) = decode(pack([stored([], [first] * blocks * SIZE)])).events
    return event.token_ids  # type: ignore[union-attr]


async def test_nothing_outlives_in_the_index():
    """The rows of an engine that evicts at random, as routers read them; in the end it is reset."""
    store, engine, model = MemoryStore(), Mirrored(), ModelCache(24, SIZE)
    writer = IndexWriter(store, "engine", 1, engine.mirror.rows, batch=5)
    engine.mirror._note = writer.note
    prompts = [[*TEXT[: 8 + 4 * at], *range(at, at + 17)] for at in range(6)]
    for step in range(60):
        tokens, salt = prompts[step * 7 % 6], "tenant" if step % 5 == 0 else ""
        model.run(tokens, salt, fresh=step % 3 == 0)
        if step % 4 == 0:
            model.evict(step * 11 % 24)
        engine.mirror.take(decode(pack(model.take())))
        while not await writer.flush() or writer.pending:
            pass
        reachable = model.reachable()
        for each, name in ((each, name) for each in prompts for name in ("", "tenant")):
            hashes = chain(root_hash(PRINT, name), each, SIZE)
            found = await store.longest_prefix(hashes, {"engine": 1})
            assert found.get("engine", 0) == sum(prefix in reachable for prefix in model.prefixes(each, name))
    assert sum(map(len, store._rows.values())) == len(engine.mirror.rows()) > 0
    model.reset()
    engine.mirror.take(decode(pack(model.take())))
    while not await writer.flush() or writer.pending:
        pass
    assert sum(map(len, store._rows.values())) == 0
