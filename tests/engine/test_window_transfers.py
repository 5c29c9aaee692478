"""Pages of windows that travel between engines: behind a prompt's blocks, with a stream, as copies, and on request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import migration
from kvferry.engine.block_interfaces import SHIP
from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Reserved
from kvferry.protocol.errors import Cancelled, StepFailed, TransferFailed
from kvferry.protocol.hashing import state_hashes
from tests.engine.carrying import BUDDY, Ship, begin, copy, granted, move_over
from tests.toy import VOCAB, expected, finish, make_job, runner_of, tokens_of
from tests.windowed_toy import make_windowed, pages_of, windowed_toy_of

PAGE = 2
"""Blocks of a page."""
BEFORE = 2
"""Full pages of a window of 9 tokens."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("length", [1, 3, 4, 8, 16, 17, 40, 61])
def test_a_prompt_is_computed_on_one_engine_and_goes_on_at_another(length: int) -> None:
    prefill, decode = make_windowed(), make_windowed()
    ship = Ship(prefill, decode, make_job("a", prompt(length), 20))
    ship.land()
    for engine in (prefill, decode):
        engine.check_integrity()
    assert min(windowed_toy_of(decode).computed, default=0) == 0
    finish(decode)
    finish(prefill)
    assert tokens_of(prefill, "a") + tokens_of(decode, "a") == expected(prompt(length), 20)
    assert min(windowed_toy_of(decode).computed) == length, "nothing of the prompt is computed again"


def test_pages_that_arrive_beside_equal_ones_are_not_read_once_they_gave_way() -> None:
    prefill, decode = make_windowed(), make_windowed()
    prompts = [[*prompt(4), each] for each in (1, 2)]
    for number, text in enumerate(prompts):
        Ship(prefill, decode, make_job(str(number), text, 30), number).land()
        decode.step()
    finish(decode)
    for number, text in enumerate(prompts):
        assert tokens_of(prefill, str(number)) + tokens_of(decode, str(number)) == expected(text, 30)


def test_blocks_that_decode_has_are_not_sent_but_the_window_is() -> None:
    prefill, decode = make_windowed(), make_windowed()
    decode.add(make_job("old", prompt(40), 2))
    finish(decode)
    job = make_job("a", [*prompt(40), 1, 2, 3], 9)
    ship = Ship(prefill, decode, job)
    assert ship.grant.first_block == 10
    assert len(ship.grant.block_ids) == 1 + PAGE * (BEFORE + 1)
    ship.land()
    finish(decode)
    assert tokens_of(prefill, "a") + tokens_of(decode, "a") == expected([*prompt(40), 1, 2, 3], 9)


def test_a_prefill_that_is_cancelled_in_its_middle_gives_all_back() -> None:
    prefill, decode = make_windowed(), make_windowed()
    ship = Ship(prefill, decode, make_job("a", prompt(60), 5))
    prefill.step()
    ship.carry()
    prefill.cancel("a", 0)
    decode.withdraw("1", Cancelled("it was"))
    assert prefill.pool.available < prefill.pool.num_blocks, "the link may read them"
    prefill.transfer_holds.ship_quiet(1)
    decode.transfer_holds.grant_quiet("1")
    for engine in (prefill, decode):
        finish(engine)
        assert engine.pool.available == engine.pool.num_blocks


def test_what_a_ship_left_behind_is_reused_on_both_sides() -> None:
    prefill, decode = make_windowed(), make_windowed()
    Ship(prefill, decode, make_job("a", prompt(45), 5)).land()
    finish(decode)
    for engine in (prefill, decode):
        windowed_toy_of(engine).computed.clear()
        engine.add(make_job("again", prompt(45), 5))
        finish(engine)
        assert tokens_of(engine, "again") == expected(prompt(45), 5)
        assert min(windowed_toy_of(engine).computed) == 44


def test_prompts_in_ships_that_share_a_prefix_get_on_in_a_small_pool() -> None:
    prefill, decode = make_windowed(num_blocks=60), make_windowed(num_blocks=900)
    prefill.add(make_job("first", prompt(60), 1))
    finish(prefill)
    ships = [Ship(prefill, decode, make_job(str(n), [*prompt(50), *prompt(40, n + 1)], 4), n) for n in range(4)]
    for ship in ships:
        ship.land()
    for engine in (prefill, decode):
        finish(engine)
    for n in range(4):
        wanted = expected([*prompt(50), *prompt(40, n + 1)], 4)
        assert tokens_of(prefill, str(n)) + tokens_of(decode, str(n)) == wanted


def test_prompts_that_block_each_other_fail_and_can_be_retried() -> None:
    engine = make_windowed(num_blocks=60)
    engine.add(make_job("a", prompt(80), 4), transfer=1, prefill_only=True)
    engine.step()
    (request,) = engine.request_table.running
    assert request.windows is not None
    engine.pool.holds.hold(("ship", 1), SHIP, request.windows.ids())
    spare = engine.pool.acquire(("ship", 1), SHIP, [], engine.pool.available)
    assert spare
    while not any(isinstance(event, Failed) for event in engine.events):
        assert engine.step()
    (failed,) = [event for event in engine.events if isinstance(event, Failed)]
    assert isinstance(failed.error, StepFailed)


def test_a_hand_over_that_cannot_go_on_gives_its_pages_back() -> None:
    prefill, decode = make_windowed(), make_windowed()
    ship = Ship(prefill, decode, make_job("a", prompt(30), 9))
    while (first := ship.carry()) is None:
        prefill.step()
    decode.start("1", replace(first.delta, token_ids=(VOCAB + 7,)))
    assert any(isinstance(event, Failed) for event in decode.events)
    finish(decode)
    assert decode.pool.available == decode.pool.num_blocks


def started(steps: int = 8, max_tokens: int = 60) -> Engine:
    engine = make_windowed()
    engine.add(make_job("a", prompt(21), max_tokens))
    for _ in range(steps):
        engine.step()
    assert tokens_of(engine, "a")
    return engine


@pytest.mark.parametrize("meanwhile", [0, 1, 3, 5, 30])
def test_a_stream_moves_with_its_window(meanwhile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "AHEAD", 10)
    source, target = started(), make_windowed()
    move = begin(source)
    grant = granted(target, move.job)
    for _ in range(meanwhile):
        source.step()
    stand = source.moving.snapshot(move.transfer)
    assert stand is not None
    source.check_integrity()
    move_over(source, move, target, grant, stand)
    for engine in (source, target):
        finish(engine)
    known = [*tokens_of(source, "a"), *tokens_of(target, "a")]
    assert known == expected(prompt(21), 60)
    assert min(windowed_toy_of(target).computed) == stand.covered, "nothing is computed again"


def test_a_stream_waits_at_the_end_of_what_was_asked_for_and_goes_on_if_it_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migration, "AHEAD", 4)
    source = started()
    move = begin(source)
    for _ in range(20):
        source.step()
    (request,) = source.request_table.running
    assert request.computed_len == move.expected_blocks * request.block_size
    source.moving.failed(move.transfer)
    source.moving.quiet(move.transfer)
    finish(source)
    assert tokens_of(source, "a") == expected(prompt(21), 60)


@pytest.mark.parametrize("written", [50, 51, 53])
def test_a_lost_stream_goes_on_at_its_buddy(written: int) -> None:
    source, buddy = make_windowed(), make_windowed()
    source.add(replace(make_job("a", prompt(21), 60), buddy=BUDDY))
    while len(tokens_of(source, "a")) < written:
        source.step()
    full = (20 + written) // 4
    assert copy(source, buddy) == full + PAGE * BEFORE
    known = [*prompt(21), *tokens_of(source, "a")]
    for engine in (source, buddy):
        engine.check_integrity()
    buddy.add(replace(make_job("a", known, 60, attempt=1), prompt_len=21))
    finish(buddy)
    assert tokens_of(buddy, "a") == expected(prompt(21), 60)[written:]
    assert min(windowed_toy_of(buddy).computed) == full * 4


def test_a_copy_that_goes_on_sends_nothing_of_the_window_again() -> None:
    source, buddy = make_windowed(), make_windowed()
    source.add(replace(make_job("a", prompt(21), 60), buddy=BUDDY))
    had = 0
    for written in (40, 44, 56):
        while len(tokens_of(source, "a")) < written:
            source.step()
        (request,) = source.request_table.running
        length = source.copies.copyable(request)
        names = pages_of(source).chain(request.hashes[:length])
        block_ids = buddy.copies.reserve("copy", names, 100)[1]
        assert len(block_ids) == length - had + PAGE * min(length - had, BEFORE)
        assert buddy.copies.land("copy") == (had, length)
        assert buddy.prefixes.count(request.hashes[:length]) == length
        buddy.check_integrity()
        had = length


def test_a_copy_without_all_pages_is_of_no_use_and_does_no_harm() -> None:
    source, buddy = make_windowed(), make_windowed()
    source.add(replace(make_job("a", prompt(21), 60), buddy=BUDDY))
    while len(tokens_of(source, "a")) < 50:
        source.step()
    assert copy(source, buddy, 18) == 18
    known = [*prompt(21), *tokens_of(source, "a")]
    buddy.add(replace(make_job("a", known, 60, attempt=1), prompt_len=21))
    finish(buddy)
    assert tokens_of(buddy, "a") == expected(prompt(21), 60)[50:]
    assert min(windowed_toy_of(buddy).computed) == 0


def test_another_engine_supplies_what_it_could_reuse_itself() -> None:
    holder, asker = make_windowed(), make_windowed()
    holder.add(make_job("a", prompt(50), 2))
    finish(holder)
    text = [*prompt(50), 1, 2, 3]
    hashes = asker._request(make_job("b", text)).hashes
    block_ids, count = holder.prefixes.chain(hashes)
    assert (count, len(block_ids)) == (12, 12 + PAGE * BEFORE)
    names = asker.prefixes.supplied(hashes, len(block_ids))
    first, ours = asker.copies.reserve("supply", names, len(names))
    for theirs, own in zip(block_ids[first:], ours, strict=True):
        runner_of(asker).kv[own] = runner_of(holder).kv[theirs]
    assert asker.copies.land("supply") == (0, 12)
    assert asker.prefixes.count(hashes) == 12
    asker.check_integrity()
    asker.add(make_job("b", text, 9))
    finish(asker)
    assert tokens_of(asker, "b") == expected(text, 9)
    assert min(windowed_toy_of(asker).computed) == 48


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_a_chain_says_how_many_of_its_blocks_hold_tokens(count: int) -> None:
    pages = pages_of(make_windowed())
    names = [bytes([number]) * 16 for number in range(count)]
    chain = pages.chain(names)
    assert len(chain) == count + PAGE * min(count, BEFORE)
    assert pages.tokens_of(len(chain)) == count
    before: dict[bytes, bytes] = dict(zip(names[1:], names, strict=False))
    for name in names:
        own = [name, *state_hashes(name, PAGE)]
        before |= dict(zip(own[1:], own, strict=False))
    parents = [pages.parent(index, len(chain)) for index in range(len(chain))]
    assert [chain[parent] if parent >= 0 else None for parent in parents] == [before.get(name) for name in chain]
    for index in range(len(chain) + 1):
        assert pages.tokens_before(index, len(chain)) == len({*names} & {*chain[:index]})


def test_a_tier_brings_a_window_with_the_blocks_before_it() -> None:
    engine = make_windowed()
    engine.add(make_job("a", prompt(70), 2))
    finish(engine)
    hashes = engine._request(make_job("b", prompt(70))).hashes
    empty = make_windowed()
    chain = pages_of(empty).chain
    tier = {*chain(hashes[:8]), *chain(hashes[:16]), *hashes[16:]}

    def run(names: Sequence[bytes]) -> int:
        return next((index for index, each in enumerate(names) if each not in tier), len(names))

    assert engine.prefixes.readable(hashes, run, 2).saved == 0, "it is here"
    assert empty.prefixes.readable(hashes, run, 2) == (chain(hashes[:16]), 16 + PAGE * BEFORE, 16)
    tier.discard(chain(hashes[:16])[-4])
    assert empty.prefixes.readable(hashes, run, 2) == (chain(hashes[:8]), 8 + PAGE * BEFORE, 8)
    tier.discard(hashes[3])
    assert empty.prefixes.readable(hashes, run, 2).saved == 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_order_of_ships_and_moves_gives_the_tokens_of_one_run(data: st.DataObject) -> None:
    """Requests begin on one engine, go on at a second, and move to a third, beside others."""
    draw: Callable[[Any], Any] = data.draw
    prefill, first, second = (make_windowed(num_blocks=draw(st.sampled_from([90, 160]))) for _ in range(3))
    wanted: dict[str, list[int]] = {}
    shared = prompt(40)
    for number in range(draw(st.integers(1, 4))):
        name = f"r{number}"
        text = shared[: draw(st.integers(1, 40))] + prompt(draw(st.integers(1, 20)), number)
        wanted[name] = expected(text, 30)
        Ship(prefill, first, make_job(name, text, 30), number + 1).land()
        for _ in range(draw(st.integers(1, 15))):
            first.step()
        running = [r for r in first.request_table.running if r.key[0] == name and r.output_here > 0 and r.decodes]
        if running and draw(st.booleans()):
            move = first.moving.begin((name, 0), 1, lambda job, number=number: 100 + number)
            grant = granted(second, move.job, "g")
            for _ in range(draw(st.integers(0, 12))):
                first.step()
            stand = first.moving.snapshot(move.transfer)
            if stand is None:
                if move.transfer in first.moving.open:
                    first.moving.failed(move.transfer)
                first.moving.quiet(move.transfer)
                second.withdraw("g", TransferFailed("ended"))
                second.transfer_holds.grant_quiet("g")
            else:
                move_over(first, move, second, grant, stand)
            second.events[:] = [e for e in second.events if not isinstance(e, Reserved)]
    engines = (prefill, first, second)
    for engine in engines:
        finish(engine)
    for name, tokens in wanted.items():
        assert [token for engine in engines for token in tokens_of(engine, name)] == tokens
    assert not [e for e in second.events if isinstance(e, Failed) and e.error.code != "transfer_failed"]
