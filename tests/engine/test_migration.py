"""Streams that move from one engine to another: the same tokens, each once, and books that balance on both."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import migration
from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, ReservationFailed, Reserved, Stepped
from kvferry.engine.migration import OutboundMigration, Snapshot
from kvferry.engine.request_states import State
from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.messages import Job, TokenDelta
from tests.toy import VOCAB, expected, finish, make_engine, make_job, runner_of, tokens_of

PROMPT = random.Random(5).choices(range(VOCAB), k=21)


def start(engine: Engine, name: str = "a", steps: int = 6, max_tokens: int = 30, **params: Any) -> None:
    """A stream in its middle."""
    engine.add(make_job(name, PROMPT, max_tokens, **params))
    for _ in range(steps):
        engine.step()
    assert tokens_of(engine, name)


def begin(engine: Engine, name: str = "a", later: int = 1) -> OutboundMigration:
    return engine.moving.begin((name, later - 1), later, lambda job: later)


def granted(engine: Engine, job: Job) -> Reserved:
    engine.reserve("grant", job)
    engine.stepper.admit_grants()
    return next(event for event in engine.events if isinstance(event, Reserved))


def copy(source: Engine, move: OutboundMigration, stand: Snapshot, target: Engine, grant: Reserved) -> None:
    """What the link does."""
    for index, ours in (*enumerate(move.full), *stand.rest):
        if index >= grant.first_block:
            runner_of(target).kv[grant.block_ids[index - grant.first_block]] = runner_of(source).kv[ours]


def land(source: Engine, move: OutboundMigration, target: Engine, grant: Reserved, stand: Snapshot) -> None:
    copy(source, move, stand, target, grant)
    target.start("grant", stand.first, stand.covered)
    source.moving.done(move.transfer)
    source.moving.quiet(move.transfer)


def failures(engine: Engine) -> list[str]:
    return [event.error.code for event in engine.events if isinstance(event, Failed)]


def computed(engine: Engine) -> int:
    return sum(event.prefill_tokens for event in engine.events if isinstance(event, Stepped))


@pytest.mark.parametrize("before", range(6, 14))
@pytest.mark.parametrize("meanwhile", [0, 1, 3, 9])
@pytest.mark.parametrize("ahead", [0, 5, 64])
def test_a_stream_goes_on_elsewhere_behind_its_last_token(
    monkeypatch: pytest.MonkeyPatch, before: int, meanwhile: int, ahead: int
) -> None:
    monkeypatch.setattr(migration, "AHEAD", ahead)
    source, target = make_engine(), make_engine()
    start(source, steps=before)
    move = begin(source)
    grant = granted(target, move.job)
    for _ in range(meanwhile):
        source.step()
    stand = source.moving.snapshot(1)
    assert stand is not None
    assert not source.has_work()
    land(source, move, target, grant, stand)
    assert failures(source) == ["moved"]
    source.check_integrity()
    finish(target)
    assert tokens_of(source, "a") + tokens_of(target, "a") == expected(PROMPT, 30)
    room = len(grant.block_ids) * 4 - len(move.job.token_ids)
    recomputed = max(0, meanwhile - room)
    assert computed(target) == (recomputed + 1 if recomputed else 0), "only what had no block is computed again"
    assert source.pool.available == source.pool.num_blocks
    assert target.pool.available == target.pool.num_blocks


def test_what_the_other_node_holds_stays_where_it_is() -> None:
    source, target = make_engine(), make_engine()
    target.add(make_job("before", PROMPT, 1))
    finish(target)
    target.events.clear()
    start(source)
    move = begin(source)
    grant = granted(target, move.job)
    assert grant.first_block == 5
    stand = source.moving.snapshot(1)
    assert stand is not None
    land(source, move, target, grant, stand)
    finish(target)
    assert tokens_of(source, "a") + tokens_of(target, "a") == expected(PROMPT, 30)


@pytest.mark.parametrize("stands", [False, True])
def test_a_stream_that_is_not_taken_runs_on(stands: bool) -> None:
    source = make_engine()
    start(source)
    begin(source)
    assert not stands or source.moving.snapshot(1)
    source.moving.failed(1)
    source.step()
    source.moving.quiet(1)
    finish(source)
    assert tokens_of(source, "a") == expected(PROMPT, 30)
    assert not failures(source)


@pytest.mark.parametrize("stands", [False, True])
def test_a_stream_that_is_cancelled_on_its_way_holds_its_blocks_until_the_link_is_quiet(stands: bool) -> None:
    source = make_engine()
    start(source)
    move = begin(source)
    assert not stands or source.moving.snapshot(1)
    held = len(move.full) + stands
    source.cancel("a", 0)
    assert not source.request_table
    assert source.pool.available == source.pool.num_blocks - held
    assert source.moving.snapshot(1) is None
    source.moving.failed(1)
    source.moving.quiet(1)
    source.check_integrity()
    assert move.request.state is State.DONE


def test_a_stream_that_lost_its_blocks_does_not_stand_and_one_that_has_others_again_does() -> None:
    source, target = make_engine(), make_engine()
    start(source)
    move = begin(source)
    grant = granted(target, move.job)
    source.scheduler.preempt(move.request)
    assert source.moving.snapshot(1) is None
    for _ in range(6):
        source.step()
    stand = source.moving.snapshot(1)
    assert stand is not None
    land(source, move, target, grant, stand)
    source.check_integrity()
    finish(target)
    assert tokens_of(source, "a") + tokens_of(target, "a") == expected(PROMPT, 30)


@pytest.mark.parametrize("what", ["unknown", "queued", "computes its prompt", "moves already", "ended"])
def test_what_does_not_stream_cannot_move(what: str) -> None:
    source = make_engine()
    if what in ("moves already", "ended"):
        start(source)
        begin(source)
    if what in ("queued", "computes its prompt"):
        source.add(make_job("a", PROMPT))
    if what == "computes its prompt":
        source.step()
    if what == "ended":
        source.cancel("a", 0)
    with pytest.raises(TransferFailed, match="does not stream here"):
        begin(source)
    if source.moving:
        source.moving.failed(1)
        source.moving.quiet(1)
    finish(source)


@pytest.mark.parametrize(("tokens", "covered"), [(0, 0), (2, 99), (2, 3), (50, 0)])
def test_a_hand_over_that_cannot_be_is_refused_by_name(tokens: int, covered: int) -> None:
    source, target = make_engine(), make_engine()
    start(source)
    move = begin(source)
    grant = granted(target, move.job)
    stand = source.moving.snapshot(1)
    assert stand is not None
    copy(source, move, stand, target, grant)
    first = stand.first.__class__("a", 1, 0, tuple([1] * tokens))
    target.start("grant", first, covered)
    assert failures(target) == ["transfer_failed"]
    target.check_integrity()


def test_a_hand_over_that_finds_no_room_for_its_last_tokens_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "AHEAD", 0)
    source, target = make_engine(), make_engine(12)
    start(source, max_tokens=24)
    move = begin(source)
    grant = granted(target, move.job)
    for _ in range(12):
        source.step()
    target.add(make_job("other", PROMPT[:14], 2))
    target.step()
    assert target.pool.available < 3
    stand = source.moving.snapshot(1)
    assert stand is not None
    land(source, move, target, grant, stand)
    assert not failures(target)
    finish(target)
    assert tokens_of(source, "a") + tokens_of(target, "a") == expected(PROMPT, 24)
    assert tokens_of(target, "other") == expected(PROMPT[:14], 2)


WHATS = ["step source", "step target", "begin", "grant", "stand", "land", "fail", "quiet", "cancel", "preempt", "crowd"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(WHATS), max_size=40), st.integers(0, 2**16))
def test_whatever_happens_in_whatever_order_no_token_is_wrong_and_no_block_lost(whats: list[str], seed: int) -> None:
    """Transfers are tried one after another, each with an attempt of its own, to the same other engine."""
    source, target = make_engine(24), make_engine(24)
    dice = random.Random(seed)
    start(source, steps=dice.randrange(3, 9))
    number, move, grant, stand, landed, loose = 0, None, None, None, False, set()
    for what in whats:
        if what == "step source" and source.has_work():
            source.step()
        elif what == "step target" and target.has_work():
            target.step()
        elif what == "crowd":
            source.add(make_job(f"x{dice.random()}", [dice.randrange(VOCAB)] * 9, 3))
        elif what == "begin" and move is None and not landed and source.request_table.find(("a", 0)):
            try:
                move = source.moving.begin(("a", 0), number + 1, lambda job, transfer=number + 1: transfer)
            except TransferFailed:
                continue
            number += 1
        elif what == "grant" and move and grant is None:
            target.events.clear()
            target.reserve(number, move.job)
            target.stepper.admit_grants()
            grant = next((e for e in target.events if isinstance(e, Reserved)), None)
            if grant is None:
                target.withdraw(number, TransferFailed("no room"))
                target.transfer_holds.grant_quiet(number)
        elif what == "stand" and move and stand is None:
            stand = source.moving.snapshot(move.transfer)
        elif what == "land" and move and grant and stand:
            copy(source, move, stand, target, grant)
            target.start(number, stand.first, stand.covered)
            source.moving.done(move.transfer)
            loose.add(move.transfer)
            landed, move = True, None
        elif what == "fail" and move:
            source.moving.failed(move.transfer)
            loose.add(move.transfer)
            if grant:
                target.withdraw(number, TransferFailed("cut"))
                target.transfer_holds.grant_quiet(number)
            move = grant = stand = None
        elif what == "quiet" and loose:
            source.moving.quiet(loose.pop())
        elif what == "cancel" and dice.random() < 0.2:
            source.cancel("a", 0)
        elif what == "preempt":
            running = [r for r in source.request_table.running if r.block_ids]
            if running:
                source.scheduler.preempt(dice.choice(running))
    if move:
        source.moving.failed(move.transfer)
        loose.add(move.transfer)
        if grant:
            target.withdraw(number, TransferFailed("cut"))
            target.transfer_holds.grant_quiet(number)
    for transfer in loose:
        source.moving.quiet(transfer)
    finish(source)
    finish(target)
    assert not any(isinstance(event, ReservationFailed) and event.granted for event in source.events)
    tokens = tokens_of(source, "a") + tokens_of(target, "a")
    assert tokens == expected(PROMPT, 30)[: len(tokens)]
    gone = set(failures(source)) | set(failures(target))
    assert len(tokens) == 30 or gone & {"cancelled", "grant_refused"}, gone
    for engine in (source, target):
        assert engine.pool.available == engine.pool.num_blocks


def test_a_ship_that_lands_on_a_block_s_end_needs_no_block_at_once() -> None:
    """Its first token opens a block, and others took the last ones: it waits, and nothing is refused or asked again."""
    prompt = random.Random(5).choices(range(VOCAB), k=20)
    engine = make_engine(12)
    engine.add(make_job("stream", random.Random(6).choices(range(VOCAB), k=13), 30))
    for _ in range(2):
        engine.step()
    engine.reserve("grant", make_job("shipped", prompt, 10))
    engine.stepper.admit_grants()
    while engine.pool.available:
        engine.step()
    engine.start("grant", TokenDelta("shipped", 0, 0, (expected(prompt, 1)[0],)))
    assert not failures(engine)
    finish(engine)
    assert len(tokens_of(engine, "shipped")) == 9
