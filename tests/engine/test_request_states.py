"""The states of a request: which moves are allowed, that each is made, and what a request does while it awaits."""

from __future__ import annotations

from itertools import product

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, ReservationFailed, Reserved
from kvferry.engine.request import Request
from kvferry.engine.request_states import MOVES, Awaits, State
from kvferry.protocol.errors import InvalidRequest, TransferFailed
from kvferry.protocol.messages import TokenDelta
from tests.toy import expected, finish, make_engine, make_job, runner_of, tokens_of

PROMPT = [1, 2, 3, 4, 5, 6]
BAD = InvalidRequest("the grammar is too large", param="response_format")


def land(engine: Engine, grant: str, name: str) -> None:
    """What the grant brings has landed, its first token with it."""
    request = engine.request_table.by_grant(grant)
    assert request is not None
    for index, block_id in enumerate(request.block_ids):
        for slot, token in enumerate(PROMPT[4 * index : 4 * index + 4]):
            runner_of(engine).kv[block_id, 0, :, 0, slot, 0] = token
    engine.start(grant, TokenDelta(name, 0, 0, tuple(expected(PROMPT, 1))))


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new in product(State, State) if new not in MOVES[old]])
def test_a_move_that_the_table_has_not_is_refused(old: State, new: State) -> None:
    request = Request(make_job("a", PROMPT), b"", 4)
    request.state = old
    with pytest.raises(AssertionError, match="not allowed"):
        request.move(new)
    assert request.state is old


def test_every_move_of_the_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[tuple[State, State]] = set()
    move = Request.move

    def noted(request: Request, new: State) -> None:
        made.add((request.state, new))
        move(request, new)

    monkeypatch.setattr(Request, "move", noted)
    engine = make_engine()
    engine.add(make_job("ships", PROMPT), transfer=1, prefill_only=True)
    engine.add(make_job("runs", [PROMPT[0] + 1, *PROMPT[1:]]))  # it would wait for a beginning that it shared
    engine.add(make_job("awaits", PROMPT), awaits=(Awaits.GRAMMAR,))
    engine.add(make_job("hopeless", PROMPT), awaits=(Awaits.GRAMMAR,))
    for grant in ("lands", "withdrawn"):
        engine.reserve(grant, make_job(grant, PROMPT))
    engine.step()
    engine.scheduler.preempt(next(r for r in engine.request_table.running if r.key[0] == "runs"))
    engine.resume(("awaits", 0), Awaits.GRAMMAR)
    engine.fail(("hopeless", 0), BAD)
    land(engine, "lands", "lands")
    engine.withdraw("withdrawn", TransferFailed("peer lost"))
    engine.add(make_job("cancelled", PROMPT))
    engine.cancel("cancelled", 0)
    engine.step()
    engine.moving.begin(("lands", 0), 1, lambda job: 2)
    assert engine.moving.snapshot(2)
    engine.moving.failed(2)
    engine.moving.quiet(2)
    engine.transfer_holds.ship_quiet(1)
    engine.transfer_holds.grant_quiet("withdrawn")
    finish(engine)
    assert made == {(old, new) for old in MOVES for new in MOVES[old]}
    assert not engine.request_table


def test_a_request_that_awaits_its_grammar_takes_no_block_and_no_turn() -> None:
    engine = make_engine()
    engine.add(make_job("a", PROMPT), awaits=(Awaits.GRAMMAR,))
    assert not engine.has_work()
    assert engine.request_table.busy
    load = engine.load()
    assert (load.waiting_requests, load.waiting_tokens, load.free_blocks) == (1, 6, 64)
    engine.add(make_job("b", PROMPT))
    finish(engine)
    assert (tokens_of(engine, "a"), tokens_of(engine, "b")) == ([], expected(PROMPT, 8))
    engine.resume(("a", 0), Awaits.GRAMMAR)
    finish(engine)
    assert tokens_of(engine, "a") == expected(PROMPT, 8)


def test_what_it_awaited_gives_it_its_place_by_arrival_behind_the_preempted() -> None:
    engine = make_engine(seqs=1)
    engine.add(make_job("preempted", PROMPT))
    engine.step()
    engine.add(make_job("a", PROMPT), awaits=(Awaits.GRAMMAR, Awaits.FETCH))
    engine.add(make_job("later", PROMPT))
    engine.scheduler.preempt(engine.request_table.running[0])
    engine.resume(("a", 0), Awaits.FETCH)
    assert [r.key[0] for r in engine.request_table.waiting] == ["preempted", "later"]
    engine.resume(("a", 0), Awaits.GRAMMAR)
    assert [r.key[0] for r in engine.request_table.waiting] == ["preempted", "a", "later"]
    engine.resume(("a", 0), Awaits.GRAMMAR)
    engine.resume(("gone", 0), Awaits.GRAMMAR)
    finish(engine)
    for name in ("preempted", "a", "later"):
        assert tokens_of(engine, name) == expected(PROMPT, 8)


@pytest.mark.parametrize("grammar_first", [False, True])
def test_a_grant_runs_when_its_blocks_and_its_grammar_are_there(grammar_first: bool) -> None:
    engine = make_engine()
    engine.reserve("g", make_job("a", PROMPT), awaits=(Awaits.GRAMMAR,))
    engine.step()
    assert [e.owner for e in engine.events if isinstance(e, Reserved)] == ["g"]
    if grammar_first:
        engine.resume(("a", 0), Awaits.GRAMMAR)
    else:
        land(engine, "g", "a")
    assert not engine.has_work()
    load = engine.load()
    assert (load.open_grants, load.running_requests, load.waiting_requests) == (
        (1, 0, 0) if grammar_first else (0, 1, 0)
    )
    if grammar_first:
        land(engine, "g", "a")
    else:
        engine.resume(("a", 0), Awaits.GRAMMAR)
    finish(engine)
    assert tokens_of(engine, "a") == expected(PROMPT, 8)[1:]


def test_a_grammar_that_comes_before_the_blocks_of_a_queued_grant_changes_nothing_else() -> None:
    engine = make_engine(num_blocks=4)
    engine.reserve("first", make_job("first", PROMPT))
    engine.reserve("g", make_job("a", PROMPT * 2), awaits=(Awaits.GRAMMAR,))
    engine.step()
    engine.resume(("a", 0), Awaits.GRAMMAR)
    assert engine.request_table.by_grant("g") is engine.request_table.waiting[0]
    engine.withdraw("first", TransferFailed("peer lost"))
    engine.transfer_holds.grant_quiet("first")
    engine.step()
    assert [e.owner for e in engine.events if isinstance(e, Reserved)] == ["first", "g"]
    assert engine.request_table.awaiting["a", 0].awaits == {Awaits.KV}


@pytest.mark.parametrize(
    ("landed", "answer"), [(None, Failed), (False, ReservationFailed), (True, Failed)], ids=["local", "grant", "landed"]
)
@pytest.mark.parametrize("how", ["fail", "cancel"])
def test_one_that_awaits_ends_with_an_answer_to_whom_it_concerns(landed: bool | None, answer: type, how: str) -> None:
    engine = make_engine()
    if landed is None:
        engine.add(make_job("a", PROMPT), awaits=(Awaits.GRAMMAR,))
    else:
        engine.reserve("g", make_job("a", PROMPT), awaits=(Awaits.GRAMMAR,))
        engine.step()
    if landed:
        land(engine, "g", "a")
    engine.events.clear()
    if how == "fail":
        engine.fail(("a", 0), BAD)
    else:
        engine.cancel("a", 0)
    (told,) = engine.events
    assert type(told) is answer
    assert isinstance(told, Failed | ReservationFailed)
    assert told.error.code == ("invalid_request_error" if how == "fail" else "cancelled")
    engine.fail(("a", 0), BAD)
    assert len(engine.events) == 1
    if landed is False:
        assert engine.pool.available == 62
        engine.transfer_holds.grant_quiet("g")
    finish(engine)
    assert engine.pool.available == 64


def test_seats_of_those_that_await_with_blocks_are_taken() -> None:
    engine = make_engine(seqs=2)
    engine.reserve("g", make_job("a", PROMPT), awaits=(Awaits.GRAMMAR,))
    engine.step()
    land(engine, "g", "a")
    for name in ("b", "c"):
        engine.add(make_job(name, PROMPT, max_tokens=3))
    engine.step()
    assert [r.key[0] for r in engine.request_table.running] == ["b"]
    engine.resume(("a", 0), Awaits.GRAMMAR)
    finish(engine)
    assert tokens_of(engine, "c") == expected(PROMPT, 3)
