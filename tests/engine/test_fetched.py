"""Blocks that come from another node for a prompt: what is held while they are given, and how they are accounted."""

from __future__ import annotations

import random

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.engine.output import _fetched_len
from kvferry.engine.request import Request
from kvferry.engine.request_states import Awaits, State
from kvferry.engine.request_table import expect
from kvferry.protocol.prefix_reuse import Reuse
from tests.toy import VOCAB, expected, finish, make_engine, make_job, runner_of, tokens_of

PROMPT = random.Random(3).choices(range(VOCAB), k=22)


def holding(num_blocks: int = 64) -> Engine:
    engine = make_engine(num_blocks)
    engine.add(make_job("before", PROMPT, 1))
    finish(engine)
    return engine


def fetching(engine: Engine) -> Request:
    engine.add(make_job("a", PROMPT, 4), awaits=(Awaits.FETCH,))
    request = engine.request_table.find(("a", 0))
    assert request is not None
    assert request.state is State.AWAITING
    return request


def fetch(source: Engine, target: Engine, request: Request) -> None:
    """What link and nodes do."""
    here = source.pool.match(request.reusable_hashes)
    source.copies.hold_chain(1, here)
    first, block_ids = target.copies.reserve("g", request.reusable_hashes[: len(here)], len(here))
    for ours, theirs in zip(here[first:], block_ids, strict=True):
        runner_of(target).kv[theirs] = runner_of(source).kv[ours]
    request.fetched += (target.copies.land("g"),)
    source.copies.returned(1)


def account(engine: Engine) -> Reuse:
    (reuse,) = [e.delta.reuse for e in engine.events if isinstance(e, Generated) and e.key[0] == "a" and e.delta.reuse]
    assert reuse.balanced
    return reuse


def test_what_came_is_not_computed_and_accounted_as_fetched() -> None:
    source, target = holding(), make_engine()
    request = fetching(target)
    fetch(source, target, request)
    target.resume(("a", 0), Awaits.FETCH)
    finish(target)
    finish(source)
    assert tokens_of(target, "a") == expected(PROMPT, 4)
    assert account(target) == Reuse(22, fetched=20, computed=2)


def test_what_was_here_before_is_reused_and_the_rest_fetched() -> None:
    source, target = holding(), make_engine()
    target.add(make_job("short", PROMPT[:9], 1))
    finish(target)
    request = fetching(target)
    fetch(source, target, request)
    target.resume(("a", 0), Awaits.FETCH)
    finish(target)
    assert account(target) == Reuse(22, reused_decode=8, fetched=12, computed=2)


def test_what_came_and_was_evicted_before_the_request_had_it_is_computed() -> None:
    source, target = holding(), make_engine(8)
    request = fetching(target)
    fetch(source, target, request)
    target.add(make_job("other", PROMPT[::-1], 1))
    while target.request_table.find(("other", 0)):
        target.step()
    assert len(target.pool.match(request.hashes)) < 5
    target.resume(("a", 0), Awaits.FETCH)
    finish(target)
    assert tokens_of(target, "a") == expected(PROMPT, 4)
    reuse = account(target)
    assert reuse.fetched < 20
    assert reuse.fetched + reuse.computed == 22


def test_what_is_given_is_held_until_it_was_sent() -> None:
    source = holding(8)
    request = Request(make_job("b", PROMPT), source._request(make_job("b", PROMPT)).root, 4)
    here = source.pool.match(request.hashes)
    source.copies.hold_chain(1, here)
    source.add(make_job("other", PROMPT[::-1], 1))
    source.step()
    assert source.pool.match(request.hashes) == here
    assert all(source.pool.holds.held(block_id) for block_id in here)
    source.copies.returned(1)
    finish(source)
    assert source.pool.available == 8


@pytest.mark.parametrize("tokens", [0, 5, 22])
def test_what_a_request_will_compute_is_known_anew(tokens: int) -> None:
    engine = make_engine()
    request = fetching(engine)
    assert engine.request_table.waiting_tokens == 22
    expect(engine.request_table, request, tokens)
    assert engine.request_table.waiting_tokens == tokens
    engine.check_integrity()
    engine.resume(("a", 0), Awaits.FETCH)
    finish(engine)
    assert engine.request_table.waiting_tokens == 0


def test_blocks_that_came_for_two_prompts_count_once() -> None:
    """Who awaited another's fetch and then its own was told of more fetched tokens than it has."""
    request = Request(make_job("a", list(range(10, 50))), b"", 4)
    request.cached_len, request.fetched = 38, ((0, 8), (2, 10), (5, 3))
    assert _fetched_len(request) == 38
