"""Recurrent states that travel between engines: behind a prompt's blocks, with a stream, as copies, and on request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import migration
from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Reserved
from kvferry.protocol.errors import Cancelled, TransferFailed
from kvferry.protocol.messages import Job
from tests.engine.carrying import BUDDY, Ship, begin, copy, granted, move_over
from tests.recurrent_toy import make_recurrent, toy_of
from tests.toy import VOCAB, expected, finish, make_job, runner_of, tokens_of

STATE_BLOCKS = 3


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("length", [1, 3, 4, 16, 17, 40, 61])
def test_a_prompt_is_computed_on_one_engine_and_goes_on_at_another(length: int) -> None:
    prefill, decode = make_recurrent(), make_recurrent()
    ship = Ship(prefill, decode, make_job("a", prompt(length), 20))
    ship.land()
    assert min(toy_of(decode).computed, default=0) == 0
    finish(decode)
    finish(prefill)
    assert tokens_of(prefill, "a") + tokens_of(decode, "a") == expected(prompt(length), 20)
    assert min(toy_of(decode).computed) == length, "nothing of the prompt is computed again"


def test_blocks_that_decode_has_are_not_sent_but_the_state_is() -> None:
    prefill, decode = make_recurrent(), make_recurrent()
    decode.add(make_job("old", prompt(40), 2))
    finish(decode)
    job = make_job("a", [*prompt(40), 1, 2, 3], 9)
    ship = Ship(prefill, decode, job)
    assert ship.grant.first_block == 10
    assert len(ship.grant.block_ids) == 1 + STATE_BLOCKS
    ship.land()
    finish(decode)
    assert tokens_of(prefill, "a") + tokens_of(decode, "a") == expected([*prompt(40), 1, 2, 3], 9)


def test_a_grant_without_rows_waits_and_a_withdrawn_one_gives_all_back() -> None:
    decode = make_recurrent(rows=1)
    granted(decode, make_job("a", prompt(20), 5), "1")
    decode.reserve("2", make_job("b", prompt(20, 1), 5))
    decode.stepper.admit_grants()
    assert sum(isinstance(e, Reserved) for e in decode.events) == 1
    decode.withdraw("1", TransferFailed("lost"))
    decode.check_integrity()
    decode.transfer_holds.grant_quiet("1")
    decode.stepper.admit_grants()
    assert sum(isinstance(e, Reserved) for e in decode.events) == 2
    decode.withdraw("2", TransferFailed("lost"))
    decode.transfer_holds.grant_quiet("2")
    finish(decode)
    assert decode.pool.available == decode.pool.num_blocks


def test_a_prefill_that_is_cancelled_in_its_middle_gives_all_back() -> None:
    prefill, decode = make_recurrent(), make_recurrent()
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


def started(name: str = "a", steps: int = 8, max_tokens: int = 60) -> Engine:
    engine = make_recurrent()
    engine.add(make_job(name, prompt(21), max_tokens))
    for _ in range(steps):
        engine.step()
    assert tokens_of(engine, name)
    return engine


@pytest.mark.parametrize("meanwhile", [0, 1, 3, 5, 30])
def test_a_stream_moves_with_its_state(meanwhile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "AHEAD", 10)
    source, target = started(), make_recurrent()
    move = begin(source)
    grant = granted(target, move.job)
    for _ in range(meanwhile):
        source.step()
    stand = source.moving.snapshot(move.transfer)
    assert stand is not None
    move_over(source, move, target, grant, stand)
    for engine in (source, target):
        finish(engine)
    known = [*tokens_of(source, "a"), *tokens_of(target, "a")]
    assert known == expected(prompt(21), 60)
    assert min(toy_of(target).computed) == stand.covered, "nothing is computed again"


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


def test_a_stream_without_room_for_a_copy_of_its_state_stays() -> None:
    source = make_recurrent(num_blocks=20)
    for name in "ab":
        source.add(make_job(name, prompt(33, ord(name)), 3))
    while len(tokens_of(source, "a")) < 2:
        source.step()
    with pytest.raises(TransferFailed, match="state"):
        begin(source)
    finish(source)
    assert tokens_of(source, "a") == expected(prompt(33, ord("a")), 3)


def test_a_stream_that_failed_to_be_offered_holds_nothing() -> None:
    source = started()

    def refuse(job: Job) -> int:
        raise TransferFailed("no link")

    with pytest.raises(TransferFailed):
        source.moving.begin(("a", 0), 1, refuse)
    finish(source)
    assert tokens_of(source, "a") == expected(prompt(21), 60)


def test_a_lost_stream_goes_on_at_its_buddy_from_the_last_checkpoint() -> None:
    source, buddy = make_recurrent(), make_recurrent()
    source.add(replace(make_job("a", prompt(21), 60), buddy=BUDDY))
    while len(tokens_of(source, "a")) < 50:
        source.step()
    assert copy(source, buddy) == 16 + STATE_BLOCKS
    known = [*prompt(21), *tokens_of(source, "a")]
    for engine in (source, buddy):
        engine.check_integrity()
    buddy.add(replace(make_job("a", known, 60, attempt=1), prompt_len=21))
    finish(buddy)
    assert tokens_of(buddy, "a") == expected(prompt(21), 60)[50:]
    assert min(toy_of(buddy).computed) == 64


def test_a_copy_without_the_end_of_its_checkpoint_is_of_no_use_and_does_no_harm() -> None:
    source, buddy = make_recurrent(), make_recurrent()
    source.add(replace(make_job("a", prompt(21), 60), buddy=BUDDY))
    while len(tokens_of(source, "a")) < 50:
        source.step()
    assert copy(source, buddy, 17) == 17
    known = [*prompt(21), *tokens_of(source, "a")]
    buddy.add(replace(make_job("a", known, 60, attempt=1), prompt_len=21))
    finish(buddy)
    assert tokens_of(buddy, "a") == expected(prompt(21), 60)[50:]
    assert min(toy_of(buddy).computed) == 0


def test_another_engine_supplies_what_it_could_reuse_itself() -> None:
    holder, asker = make_recurrent(stride=100), make_recurrent(stride=100)
    holder.add(make_job("a", prompt(50), 2))
    finish(holder)
    text = [*prompt(50), 1, 2, 3]
    hashes = asker._request(make_job("b", text)).hashes
    block_ids, count = holder.prefixes.chain(hashes)
    assert (count, len(block_ids)) == (12, 12 + STATE_BLOCKS)
    names = asker.prefixes.supplied(hashes, len(block_ids))
    first, ours = asker.copies.reserve("supply", names, len(names))
    for theirs, own in zip(block_ids[first:], ours, strict=True):
        runner_of(asker).kv[own] = runner_of(holder).kv[theirs]
    asker.copies.land("supply")
    assert asker.prefixes.count(hashes) == 12
    asker.add(make_job("b", text, 9))
    finish(asker)
    assert tokens_of(asker, "b") == expected(text, 9)
    assert min(toy_of(asker).computed) == 48


def test_a_tier_brings_a_checkpoint_with_the_blocks_before_it() -> None:
    engine = make_recurrent(stride=8)
    engine.add(make_job("a", prompt(70), 2))
    finish(engine)
    assert engine.states is not None
    hashes = engine._request(make_job("b", prompt(70))).hashes
    tier = {*engine.states.chain(hashes[:8]), *engine.states.chain(hashes[:16]), *hashes[16:]}

    def run(names: Sequence[bytes]) -> int:
        return next((index for index, each in enumerate(names) if each not in tier), len(names))

    assert engine.prefixes.readable(hashes, run, 2).saved == 0, "it is here"
    empty = make_recurrent()
    assert empty.states is not None
    found = empty.prefixes.readable(hashes, run, 2)
    assert found == (empty.states.chain(hashes[:16]), 16 + STATE_BLOCKS, 16)
    tier.discard(empty.states.chain(hashes[:16])[-1])
    assert empty.prefixes.readable(hashes, run, 2) == (empty.states.chain(hashes[:8]), 8 + STATE_BLOCKS, 8)
    tier.discard(hashes[3])
    assert empty.prefixes.readable(hashes, run, 2).saved == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_ships_and_moves_gives_the_tokens_of_one_run(data: st.DataObject) -> None:
    """Requests begin on one engine, go on at a second, and move to a third, beside others."""
    draw = data.draw
    prefill, first, second = (make_recurrent(num_blocks=120, stride=draw(st.sampled_from([2, 8]))) for _ in range(3))
    wanted, outputs = {}, []
    shared = prompt(40)
    for number in range(draw(st.integers(1, 4))):
        name = f"r{number}"
        text = shared[: draw(st.integers(1, 40))] + prompt(draw(st.integers(1, 20)), number)
        wanted[name] = expected(text, 30)
        ship = Ship(prefill, first, make_job(name, text, 30), number + 1)
        ship.land()
        for _ in range(draw(st.integers(1, 15))):
            first.step()
        if draw(st.booleans()):
            running = [r for r in first.request_table.running if r.key[0] == name and r.output_here > 0 and r.decodes]
            if running:
                move = first.moving.begin((name, 0), 1, lambda job, number=number: 100 + number)
                grant = granted(second, move.job, "g")
                for _ in range(draw(st.integers(0, 12))):
                    first.step()
                stand = first.moving.snapshot(move.transfer)
                if stand is None:
                    first.moving.failed(move.transfer) if move.transfer in first.moving.open else None
                    first.moving.quiet(move.transfer)
                    second.withdraw("g", TransferFailed("ended"))
                    second.transfer_holds.grant_quiet("g")
                else:
                    move_over(first, move, second, grant, stand)
                second.events[:] = [e for e in second.events if not isinstance(e, Reserved)]
    for engine in (prefill, first, second):
        finish(engine)
        outputs.append(engine)
    for name, tokens in wanted.items():
        assert [token for engine in outputs for token in tokens_of(engine, name)] == tokens
    assert not [e for e in second.events if isinstance(e, Failed) and e.error.code not in ("transfer_failed",)]
