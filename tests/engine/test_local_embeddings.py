"""Rows from this process: encoded once for all who want them, in turn by tenant, within bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kvferry.engine.media import local_embeddings
from kvferry.engine.media.embedding_cache import EmbeddingCache
from kvferry.engine.media.local_embeddings import LocalEmbeddings
from kvferry.protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded
from kvferry.protocol.media import MediaItem
from tests.media_parts import FakeEncoder, image, local, rows_of
from tests.waiting import wait_for

ROOT = b"root"


class Asked:
    """A call, and its answer."""

    def __init__(
        self, source: LocalEmbeddings, *items: MediaItem, root: bytes = ROOT, deadline_s: float = 20.0
    ) -> None:
        self.items, self.outcome, self.count = items, None, 0
        self._done = threading.Event()
        self.cancel = source.submit(root, items, self._ready, deadline_s)

    def _ready(self, outcome: Any) -> None:
        self.outcome, self.count = outcome, self.count + 1
        self._done.set()

    def check(self) -> None:
        """Its rows come, once."""
        rows = self.wait()
        assert [each[:, 0].tolist() for each in rows] == [rows_of(item) for item in self.items]
        assert self.count == 1

    def wait(self) -> Any:
        assert self._done.wait(10)
        return self.outcome


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def source(encoder: FakeEncoder) -> Iterator[LocalEmbeddings]:
    made = local(encoder)
    yield made
    encoder.gate.set()
    made.stop()


def pictures(count: int) -> list[MediaItem]:
    return [image(b"%d" % number, 10 * number) for number in range(count)]


def held(encoder: FakeEncoder, source: LocalEmbeddings) -> Asked:
    """A call that the encoder works on until its gate is open."""
    encoder.gate.clear()
    asked = Asked(source, image(b"first", 0))
    wait_for(lambda: source.mark is not None, 5)
    return asked


def test_calls_in_flight_and_later_ones_share_what_is_encoded(encoder: FakeEncoder, source: LocalEmbeddings) -> None:
    told: list[tuple[str, str]] = []
    source.observe = lambda item, outcome, seconds: told.append((item.modality, outcome))
    one, two, three = pictures(3)
    first = held(encoder, source)
    calls = [Asked(source, one, two), Asked(source, two, three, two)]
    assert source.waiting == 4
    encoder.gate.set()
    for each in (first, *calls):
        each.check()
    again = Asked(source, three, one)
    assert again.count == 1, "at once"
    again.check()
    assert len(encoder.encoded) == len(set(encoder.encoded)) == source.encoded == 4
    assert told == [("image", "encoded")] * 4 + [("image", "cached")] * 2
    wait_for(lambda: source.mark is None, 5)
    assert source.waiting == 0


def test_roots_share_nothing_and_take_turns(encoder: FakeEncoder, source: LocalEmbeddings) -> None:
    first = held(encoder, source)
    one, two, three = pictures(3)
    calls = [Asked(source, one), Asked(source, two), Asked(source, three), Asked(source, one, root=b"other")]
    encoder.gate.set()
    for each in (first, *calls):
        each.check()
    assert encoder.encoded[1:] == [one.hash, one.hash, two.hash, three.hash]


def test_nothing_is_encoded_for_those_who_left_or_are_late(encoder: FakeEncoder, source: LocalEmbeddings) -> None:
    first = held(encoder, source)
    gone, late, shared = pictures(3)
    left = Asked(source, gone, shared)
    overdue = Asked(source, late, deadline_s=0.0)
    stays = Asked(source, shared)
    left.cancel()
    encoder.gate.set()
    assert isinstance(overdue.wait(), DeadlineExceeded)
    for each in (first, stays):
        each.check()
    assert encoder.encoded[1:] == [shared.hash]
    assert left.count == 0
    first.cancel()


def test_an_item_that_fails_fails_all_who_want_it_once(encoder: FakeEncoder, source: LocalEmbeddings) -> None:
    first = held(encoder, source)
    broken, other = image(b"broken", 0), image(b"whole", 10)
    calls = [Asked(source, broken, other), Asked(source, other, broken), Asked(source, other)]
    encoder.gate.set()
    first.check()
    assert [type(each.wait()) for each in calls[:2]] == [InvalidRequest] * 2
    calls[2].check()
    assert isinstance(Asked(source, broken).wait(), InvalidRequest)
    assert [each.count for each in calls] == [1, 1, 1]
    assert encoder.encoded.count(broken.hash) == 2, "errors are not kept"


def test_rows_of_a_wrong_shape_are_an_error(monkeypatch: pytest.MonkeyPatch, source: LocalEmbeddings) -> None:
    def encode(encoder: FakeEncoder, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        return [torch.zeros(items[0].length + 1, 1)]

    monkeypatch.setattr(FakeEncoder, "encode", encode)
    assert "shape (6, 1) for 5 tokens" in str(Asked(source, image(b"a", 0)).wait())


def test_a_root_takes_half_of_what_others_leave(
    monkeypatch: pytest.MonkeyPatch, encoder: FakeEncoder, source: LocalEmbeddings
) -> None:
    monkeypatch.setattr(local_embeddings, "MAX_QUEUED", 5)
    first = held(encoder, source)
    one, two, three = pictures(3)
    waits = Asked(source, one, two)
    with pytest.raises(Overloaded):
        Asked(source, three)
    same = Asked(source, two, one)
    others = Asked(source, one, root=b"other")
    with pytest.raises(Overloaded):
        Asked(source, two, root=b"other")
    encoder.gate.set()
    for each in (first, waits, same, others):
        each.check()


def test_items_of_a_cancelled_call_leave_the_queue(encoder: FakeEncoder, source: LocalEmbeddings) -> None:
    first = held(encoder, source)
    one, two, three = pictures(3)
    kept, leaves = Asked(source, two), Asked(source, one, two, three)
    late = Asked(source, three, deadline_s=0.0)
    assert source.waiting == 4
    leaves.cancel()
    assert source.waiting == 3, "another call wants the second, and the third's call is not told yet"
    encoder.gate.set()
    for each in (first, kept):
        each.check()
    assert isinstance(late.wait(), DeadlineExceeded)
    wait_for(lambda: source.waiting == 0, 5)
    assert {one.hash, three.hash}.isdisjoint(encoder.encoded)


def test_a_callback_that_raises_ends_neither_the_thread_nor_other_calls(
    encoder: FakeEncoder, source: LocalEmbeddings
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the loop is closed")

    one, two = pictures(2)
    source.observe = broken
    source.submit(ROOT, [one], broken, 20.0)
    Asked(source, one, two).check()
    source.submit(ROOT, [one, two], broken, 20.0)
    Asked(source, two, one).check()


def test_the_cache_keeps_what_was_used_last_within_its_bound() -> None:
    cache = EmbeddingCache(40)
    rows = {name: torch.full((4, 1), float(number)) for number, name in enumerate("abc")}
    for name in "ab":
        cache.put((ROOT, name), rows[name])
    assert cache.get((ROOT, "a")) is rows["a"]
    cache.put((ROOT, "c"), rows["c"])
    assert (cache.get((ROOT, "b")), cache.get((b"", "a")), len(cache), cache.bytes) == (None, None, 2, 32)
    cache.put((ROOT, "large"), torch.zeros(11, 1))
    cache.put((ROOT, "c"), rows["c"])
    assert (len(cache), cache.bytes) == (2, 32)
