"""A long prompt that landed by a grant becomes findable in slices, between which running streams have their turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.engine import step
from kvferry.engine.engine import Engine
from kvferry.engine.events import Reserved
from kvferry.protocol.messages import TokenDelta
from tests.toy import VOCAB, expected, finish, make_engine, make_job, runner_of, tokens_of

PROMPT = [(5 * i + 1) % VOCAB for i in range(41)]
"""Ten full blocks."""


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "REGISTERED_AT_ONCE", 3)


def landed(engine: Engine, max_tokens: int, *others: object, after: str = "") -> None:
    """Its blocks came with what another engine computed, after this other request's first token."""
    source = make_engine()
    source.add(make_job("a", PROMPT, 1))
    while not tokens_of(source, "a"):
        source.step()
    engine.reserve("g", make_job("a", PROMPT, max_tokens))
    engine.step()
    for other in others:
        engine.add(other)  # type: ignore[arg-type]
    while after and not tokens_of(engine, after):
        engine.step()
    (reserved,) = [event for event in engine.events if isinstance(event, Reserved)]
    held = source.pool.match(source._request(make_job("a", PROMPT)).hashes)
    for here, there in zip(reserved.block_ids, held, strict=False):
        runner_of(engine).kv[here] = runner_of(source).kv[there]
    for position in range(len(held) * 4, len(PROMPT)):
        runner_of(engine).kv[reserved.block_ids[position // 4], 0, :, 0, position % 4, 0] = PROMPT[position]
    engine.start("g", TokenDelta("a", 0, 0, (expected(PROMPT, 1)[0],)))


def test_each_turn_registers_a_slice_until_all_is_findable() -> None:
    engine = make_engine()
    landed(engine, 8)
    (request,) = engine.request_table.running
    seen = [request.registered]
    while request.registered < 10:
        engine.step()
        seen.append(request.registered)
    assert seen[:3] == [3, 6, 9]
    finish(engine)
    assert tokens_of(engine, "a") == expected(PROMPT, 8)[1:]
    assert len(engine.pool.match(request.hashes)) >= 10


def test_one_that_ends_before_leaves_everything_findable() -> None:
    engine = make_engine()
    landed(engine, 2)
    (request,) = engine.request_table.running
    engine.step()
    assert not engine.request_table
    assert len(engine.pool.match(request.hashes)) == 10
    finish(engine)


def test_forks_that_wait_for_it_find_all_of_it() -> None:
    engine = make_engine()
    landed(engine, 4, replace(make_job("f", PROMPT, 4), fork_of="a"))
    assert next(r for r in engine.request_table if r.key[0] == "a").registered == 10
    finish(engine)
    assert tokens_of(engine, "f") == expected(PROMPT, 4)


@pytest.mark.parametrize("length", [4, 5, 8])
def test_blocks_that_give_way_to_equal_ones_later_are_not_read_any_more(length: int) -> None:
    engine = make_engine(num_blocks=30)
    engine.add(make_job("grows", [3] * length, 30))
    engine.step()
    landed(engine, 12, make_job("b", PROMPT, 1), after="b")
    finish(engine)
    assert tokens_of(engine, "a") == expected(PROMPT, 12)[1:]
    assert tokens_of(engine, "grows") == expected([3] * length, 30)
