"""Copies of a stream's blocks at its buddy: made of what is full, found there like any others, and never in the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvferry.engine import replication
from kvferry.engine.engine import Engine
from kvferry.engine.request import Request
from kvferry.protocol.errors import GrantRefused
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.messages import DecodeTarget
from tests.toy import FINGERPRINT, VOCAB, expected, finish, make_engine, make_job, runner_of, tokens_of

BUDDY = DecodeTarget("p", 1, "p:1", FINGERPRINT)
PROMPT = random.Random(5).choices(range(VOCAB), k=21)


def start(engine: Engine, name: str = "a", steps: int = 40, buddy: DecodeTarget | None = BUDDY) -> None:
    """A stream in its middle: ten new full blocks."""
    engine.add(replace(make_job(name, PROMPT, 80), buddy=buddy))
    for _ in range(steps):
        engine.step()


def due(engine: Engine, *shunned: DecodeTarget) -> Request | None:
    return next(iter(engine.copies.due(1, (), shunned)), None)


def hashes(count: int = 80) -> list[bytes]:
    return chain(root_hash(FINGERPRINT), [*PROMPT, *expected(PROMPT, count)], 4)


def copy(source: Engine, target: Engine, request: Request, most: int = 100) -> int:
    """What link and nodes do; how many leading blocks the buddy has then."""
    first, block_ids = target.copies.reserve("g", request.hashes[: request.registered], most)
    chain = source.copies.chain(request, first + len(block_ids))
    assert chain is not None
    transfer_holds = source.copies.hold_copy(1, chain, first)
    for (_, ours), theirs in zip(transfer_holds, block_ids, strict=True):
        runner_of(target).kv[theirs] = runner_of(source).kv[ours]
    target.copies.land("g")
    source.copies.returned(1)
    request.copied = first + len(block_ids)
    return request.copied


def test_a_stream_is_copied_once_it_has_enough_that_is_new() -> None:
    engine = make_engine()
    start(engine, steps=10)
    assert due(engine) is None, "of the prompt's blocks the buddy computed all"
    for _ in range(30):
        engine.step()
    request = due(engine)
    assert request is not None
    assert request.registered - len(PROMPT) // 4 >= replication.MIN_BLOCKS
    assert due(engine, BUDDY) is None
    finish(engine)
    assert due(engine) is None


def test_a_stream_without_a_buddy_is_not_copied() -> None:
    engine = make_engine()
    start(engine, buddy=None)
    assert due(engine) is None


def test_the_stream_with_most_to_copy_is_the_first() -> None:
    engine = make_engine()
    start(engine, "long", steps=10)
    start(engine, "short", steps=40)
    request = due(engine)
    assert request is not None
    assert request.key[0] == "long"
    assert [r.key[0] for r in engine.copies.due(9)] == ["long", "short"]
    assert [r.key[0] for r in engine.copies.due(9, {request.key})] == ["short"]


@pytest.mark.parametrize("most", [3, 100])
def test_what_was_copied_is_reused_and_the_rest_computed(most: int) -> None:
    source, target = make_engine(), make_engine()
    start(source)
    request = due(source)
    assert request is not None
    had = copy(source, target, request, most)
    while had < request.registered:
        had = copy(source, target, request, most)
    target.check_integrity()
    assert target.pool.match(hashes()) == target.pool.match(request.hashes[:had])
    assert len(target.pool.match(hashes())) == had
    made = tokens_of(source, "a")
    job = make_job("b", [*PROMPT, *made], 80)
    target.add(replace(job, prompt_len=len(PROMPT)))
    target.step()
    (again,) = target.request_table.running
    assert again.cached_len == had * 4
    finish(target)
    assert made + tokens_of(target, "b") == expected(PROMPT, 80)
    finish(source)


def test_blocks_that_are_here_already_are_not_asked_for() -> None:
    source, target = make_engine(), make_engine()
    target.add(make_job("prompt", PROMPT, 1))
    finish(target)
    start(source)
    request = due(source)
    assert request is not None
    first, block_ids = target.copies.reserve("g", request.hashes[: request.registered], 100)
    assert (first, len(block_ids)) == (5, request.registered - 5)
    target.copies.quiet("g")
    target.check_integrity()
    assert target.pool.available == target.pool.num_blocks


def test_what_did_not_land_is_found_by_nobody() -> None:
    target = make_engine()
    target.copies.reserve("g", hashes(), 100)
    assert target.pool.available == target.pool.num_blocks - len(hashes())
    target.copies.quiet("g")
    target.check_integrity()
    assert not target.pool.match(hashes())


def test_a_stream_that_ended_lends_nothing() -> None:
    engine = make_engine()
    start(engine)
    request = due(engine)
    assert request is not None
    engine.cancel("a", 0)
    assert engine.copies.chain(request, 3) is None
    engine.check_integrity()


def test_a_stream_that_was_preempted_lends_nothing() -> None:
    engine = make_engine()
    start(engine)
    request = due(engine)
    assert request is not None
    engine.scheduler.preempt(request)
    assert engine.copies.chain(request, 3) is None
    finish(engine)
    assert tokens_of(engine, "a") == expected(PROMPT, 80)


def test_lent_blocks_outlive_their_stream() -> None:
    engine = make_engine()
    start(engine)
    request = due(engine)
    assert request is not None
    chain = engine.copies.chain(request, 6)
    assert chain is not None
    assert engine.copies.hold_copy(1, chain, 2)
    engine.cancel("a", 0)
    assert engine.pool.available == engine.pool.num_blocks - 6
    engine.copies.returned(1)
    engine.check_integrity()
    assert engine.pool.acquire("test", "request", [], engine.pool.num_blocks), "leaves are evicted first"


def test_no_copy_is_taken_where_the_room_may_be_needed() -> None:
    engine = make_engine(32)
    engine.copies.reserve("g", hashes(), 20)
    with pytest.raises(GrantRefused, match="no room"):
        engine.copies.reserve("h", [bytes([i]) * 16 for i in range(9)], 9)
    engine.copies.land("g")
    engine.add(make_job("a", [7] * 100, 8))
    finish(engine)
    assert tokens_of(engine, "a") == expected([7] * 100, 8), "copies are evicted for it"


def test_no_copy_is_taken_where_nothing_is_cached() -> None:
    with pytest.raises(GrantRefused, match="prefix cache is off"):
        make_engine(caching=False).copies.reserve("g", hashes(), 20)


def test_what_was_computed_meanwhile_is_kept_once() -> None:
    source, target = make_engine(), make_engine()
    start(source)
    request = due(source)
    assert request is not None
    first, block_ids = target.copies.reserve("g", request.hashes[: request.registered], 100)
    target.add(make_job("same", PROMPT, 20))
    while target.has_work():
        assert target.step()
    ours_from = source.copies.chain(request, len(block_ids))
    assert ours_from is not None
    for (_, ours), theirs in zip(source.copies.hold_copy(1, ours_from, first), block_ids, strict=True):
        runner_of(target).kv[theirs] = runner_of(source).kv[ours]
    target.copies.land("g")
    target.check_integrity()
    assert len(target.pool.match(hashes())) == request.registered
