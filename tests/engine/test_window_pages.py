"""Pages of layers with windows: which a request holds, what is reused, and how they leave."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.engine import Engine
from kvferry.engine.events import BlocksChanged, Generated
from kvferry.protocol.hashing import chain, root_hash, state_hashes
from kvferry.router.nodes.checkpoints import Checkpoints
from tests.toy import FINGERPRINT, VOCAB, expected, finish, make_job, tokens_of
from tests.windowed_toy import WINDOW, make_windowed, pages_of, windowed_toy_of

SIZE = 4
BEFORE = 2
"""Full blocks that a window of 9 tokens reaches back over."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def run(engine: Engine, name: str, tokens: list[int], most: int = 8) -> tuple[int, int]:
    """Compute a request and check its tokens; what it reused and computed of its prompt."""
    windowed_toy_of(engine).computed.clear()
    engine.add(make_job(name, tokens, most))
    finish(engine)
    assert tokens_of(engine, name) == expected(tokens, most)
    first = next(e for e in engine.events if isinstance(e, Generated) and e.key[0] == name)
    assert first.delta.reuse is not None
    found = first.delta.reuse.reused_decode, first.delta.reuse.computed
    assert sum(found) == len(tokens)
    assert len(windowed_toy_of(engine).computed) == found[1] + most - 1, "it computed what it says"
    return found


@pytest.mark.parametrize("windows", [(9, 0, 9, 9, 0), (0, 5), (13, 13, 0), (-8, -8, 0, -8), (0, 1)])
@pytest.mark.parametrize("length", [1, 3, 4, 9, 40, 61])
def test_tokens_are_those_of_one_run(windows: tuple[int, ...], length: int) -> None:
    engine = make_windowed(windows=windows)
    assert run(engine, "a", prompt(length), 30) == (0, length)
    reused = (length - 1) // SIZE * SIZE
    assert run(engine, "b", prompt(length), 30) == (reused, length - reused)


def test_a_stream_holds_the_pages_of_its_window_alone() -> None:
    engine = make_windowed(num_blocks=200)
    engine.add(make_job("a", prompt(90), 100))
    while len(tokens_of(engine, "a")) < 60:
        engine.step()
        engine.check_integrity()
        (request,) = engine.request_table.running
        assert request.windows is not None
        chunk = 0 if request.decodes else 16 // SIZE
        assert request.windows.end - request.windows.first <= BEFORE + 2 + chunk
    assert engine.pool.holds.num_held == len(request.block_ids) + len(request.windows.ids())
    assert len(request.windows.ids()) <= 2 * (BEFORE + 2)


def test_a_prefix_is_reused_up_to_where_a_window_is_whole() -> None:
    engine = make_windowed(num_blocks=200)
    run(engine, "a", prompt(61), 2)
    hashes = chain(root_hash(FINGERPRINT), prompt(61), SIZE)
    assert run(engine, "b", [*prompt(30), 1, 2, 3]) == (28, 5), "pages behind the window are cached"
    for gone, reused in ((14, 56), (12, 48), (11, 44), (0, 44)):
        names = state_hashes(hashes[gone], 2)
        engine.pool.forget(engine.pool.match(names[-1:]))
        assert pages_of(engine).covered(hashes) == reused // SIZE
    engine.check_integrity()


def test_pages_behind_a_window_leave_before_what_others_may_need() -> None:
    engine = make_windowed(num_blocks=80)
    run(engine, "a", prompt(61), 2)
    run(engine, "b", prompt(61, 1), 2)
    assert engine.pool.evicted_total > 0
    assert run(engine, "a again", prompt(61)) == (60, 1)
    assert run(engine, "b again", prompt(61, 1)) == (60, 1)


def test_requests_that_share_a_prefix_share_its_pages() -> None:
    engine = make_windowed(num_blocks=200)
    run(engine, "a", prompt(40), 2)
    for name in "bcd":
        engine.add(make_job(name, [*prompt(40), ord(name)], 40))
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    finish(engine)
    for name in "bcd":
        assert tokens_of(engine, name) == expected([*prompt(40), ord(name)], 40)


def test_forks_begin_behind_the_full_blocks_of_their_prompt() -> None:
    engine = make_windowed(num_blocks=200)
    for number in range(3):
        job = make_job(f"f{number}", prompt(42), 20)
        engine.add(job if not number else replace(job, fork_of="f0"))
    finish(engine)
    assert len(windowed_toy_of(engine).computed) == 42 + 2 * 2 + 3 * 19
    assert all(tokens_of(engine, f"f{number}") == expected(prompt(42), 20) for number in range(3))


def test_what_a_preempted_stream_had_computed_is_reused() -> None:
    engine = make_windowed(num_blocks=100)
    engine.add(make_job("a", prompt(50), 30))
    while len(tokens_of(engine, "a")) < 10:
        engine.step()
    windowed_toy_of(engine).computed.clear()
    engine.scheduler.preempt(engine.request_table.running[0])
    engine.check_integrity()
    finish(engine)
    assert min(windowed_toy_of(engine).computed) == 56
    assert tokens_of(engine, "a") == expected(prompt(50), 30)


@pytest.mark.parametrize("caching", [True, False])
def test_streams_that_need_more_than_the_pool_has_take_turns(caching: bool) -> None:
    engine = make_windowed(num_blocks=44, caching=caching)
    for number in range(5):
        engine.add(make_job(str(number), prompt(30, number), 40))
    finish(engine)
    assert engine.scheduler.preempted_total > 0
    for number in range(5):
        assert tokens_of(engine, str(number)) == expected(prompt(30, number), 40)


def test_the_longest_sequence_fills_the_pool() -> None:
    engine = make_windowed(num_blocks=40)
    assert engine.longest == SIZE * (40 - 2 * 7)
    engine.add(make_job("a", prompt(engine.longest - 1), 1))
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(engine.longest - 1), 1)


@pytest.mark.parametrize("drafts", [3, 20])
def test_drafts_have_pages_too(drafts: int) -> None:
    engine = make_windowed(num_blocks=200, drafts=drafts)
    text = prompt(12) * 4
    engine.add(make_job("a", text, 60))
    finish(engine)
    assert tokens_of(engine, "a") == expected(text, 60)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_company_leaves_the_tokens_as_they_are(data: st.DataObject) -> None:
    draw = data.draw
    windows = draw(st.sampled_from([(WINDOW, 0, WINDOW, WINDOW, 0), (0, 6), (-8, 0, -8, -8)]))
    engine = make_windowed(
        num_blocks=draw(st.integers(48, 120)), windows=windows, drafts=draw(st.sampled_from([0, 0, 4]))
    )
    wanted, shared = {}, prompt(60)
    for number in range(draw(st.integers(2, 7))):
        text = shared[: draw(st.integers(0, 60))] + prompt(draw(st.integers(1, 20)), number)
        count = draw(st.integers(1, 30))
        wanted[str(number)] = expected(text, count)
        engine.add(make_job(str(number), text, count))
        for _ in range(draw(st.integers(0, 8))):
            engine.step()
        if draw(st.booleans()) and engine.request_table.running:
            engine.scheduler.preempt(engine.request_table.running[-1])
        engine.check_integrity()
    finish(engine)
    assert {name: tokens_of(engine, name) for name in wanted} == wanted


def test_routers_find_pages_as_they_find_checkpoints() -> None:
    engine = make_windowed(num_blocks=200)
    run(engine, "a", prompt(61), 2)
    pages, rows = pages_of(engine), set(engine.pool.changes.rows())
    hashes = chain(root_hash(FINGERPRINT), prompt(61), SIZE)
    known = Checkpoints(pages.num_blocks, pages.stride)
    assert all(known.row(hashes, count) in rows for count in range(1, len(hashes) + 1))
    engine.pool.forget(engine.pool.match(state_hashes(hashes[7], 2)[-1:]))
    assert known.row(hashes, 8) not in set(engine.pool.changes.rows())


def test_tiers_keep_the_windows_from_which_a_prompt_may_go_on() -> None:
    engine = make_windowed(num_blocks=200)
    run(engine, "a", prompt(61), 2)
    hashes = chain(root_hash(FINGERPRINT), prompt(61), SIZE)
    run(engine, "b", [*prompt(45), 1, 2, 3], 2)
    untiered, kept = (
        engine.pool.changes.untiered,
        {h for e in engine.events if isinstance(e, BlocksChanged) for h in e.kept},
    )

    def pages(count: int) -> set[bytes]:
        return {name for each in hashes[count - BEFORE : count] for name in state_hashes(each, 2)}

    whole = [count for count in range(BEFORE, 16) if not pages(count) & untiered]
    assert whole == [8, 11, 14, 15], "at every eighth block, where b left a, and at the end"
    assert kept >= pages(11) | pages(14)
    assert not {*hashes} & untiered
    engine.pool.forget(range(200))
    assert not untiered
