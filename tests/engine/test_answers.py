"""Anyone who asked the engine gets an answer, also where a command or a step breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Event, Failed, Generated, ReservationFailed
from kvferry.engine.request import Request
from kvferry.protocol.messages import Job, TokenDelta
from tests.toy import VOCAB, expected, make_engine, make_job


def broken(name: str = "a") -> Job:
    """A job that no message could carry: it breaks anyone who looks at it."""
    return replace(make_job(name, [1, 2, 3]), token_ids=(1, None, 3))  # type: ignore[arg-type]


def answers(engine: Engine, kind: type[Event]) -> list[Event]:
    return [e for e in engine.events if isinstance(e, kind)]


def finish(engine: Engine) -> None:
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
        assert steps < 100
    engine.check_integrity()


def test_an_attempt_that_breaks_its_command_is_failed() -> None:
    engine = make_engine()
    engine.add(broken())
    engine.add(broken(), transfer=3, prefill_only=True)
    failed = answers(engine, Failed)
    assert [(e.key, e.router_id, e.error.code) for e in failed] == [(("a", 0), "router", "node_lost")] * 2  # type: ignore[union-attr]
    finish(engine)


def test_a_reservation_that_breaks_its_command_is_refused() -> None:
    engine = make_engine()
    engine.reserve("g", broken())
    refused = answers(engine, ReservationFailed)
    assert [(e.owner, e.granted, e.error.code) for e in refused] == [("g", False, "node_lost")]  # type: ignore[union-attr]
    finish(engine)


def test_a_command_that_breaks_once_it_was_queued_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine.pool, "match", lambda hashes: 1 / 0)
    engine.add(make_job("a", [1, 2, 3]))
    monkeypatch.undo()
    enter = engine.request_table.enter
    monkeypatch.setattr(engine.request_table, "enter", lambda request: (enter(request), 1 / 0))
    engine.reserve("g", make_job("b", [1, 2, 3]))
    engine.add(make_job("c", [1, 2, 3]))
    monkeypatch.undo()
    assert (len(answers(engine, Failed)), len(answers(engine, ReservationFailed))) == (2, 1)
    assert not engine.has_work()
    engine.add(make_job("a", [1, 2, 3]))
    finish(engine)
    assert len(answers(engine, Generated)) == 8


@pytest.mark.parametrize("token_ids", [(VOCAB,), (-1,), (None,), None])
def test_a_first_token_that_is_none_fails_the_attempt_it_belongs_to(token_ids: object) -> None:
    engine = make_engine()
    engine.add(make_job("other", [4, 5, 6]))
    engine.reserve("g", make_job("a", [1, 2, 3, 4, 5]))
    engine.step()
    engine.start("g", TokenDelta("a", 0, 0, token_ids))  # type: ignore[arg-type]
    assert [e.key for e in answers(engine, Failed)] == [("a", 0)]  # type: ignore[union-attr]
    finish(engine)
    made = [t for e in answers(engine, Generated) for t in e.delta.token_ids]  # type: ignore[union-attr]
    assert made == expected([4, 5, 6], 8)


@pytest.mark.parametrize("reserved", [False, True])
def test_what_breaks_every_step_does_not_stay_at_the_head_of_the_queue(
    monkeypatch: pytest.MonkeyPatch, reserved: bool
) -> None:
    engine = make_engine()
    hashes = Request.reusable_hashes

    def spoiled(request: Request) -> list[bytes]:
        if request.job.request_id == "bad" and queued:
            raise RuntimeError("boom")
        found: list[bytes] = hashes.__get__(request)
        return found

    queued = False
    monkeypatch.setattr(Request, "reusable_hashes", property(spoiled))
    if reserved:
        engine.reserve("bad", make_job("bad", [1, 2, 3]))
    else:
        engine.add(make_job("bad", [1, 2, 3]))
    engine.add(make_job("good", [4, 5, 6]))
    queued = True
    finish(engine)
    assert len(answers(engine, ReservationFailed if reserved else Failed)) == 1
    assert len(answers(engine, Generated)) == 8


@pytest.mark.parametrize("token_ids", [(), (5,) * 9])
def test_a_hand_over_with_no_token_or_too_many_ends_alone(token_ids: tuple[int, ...]) -> None:
    """Without a token, or with more than the reserved blocks hold, it broke the step of all that ran."""
    engine = make_engine()
    engine.add(make_job("other", [7, 8, 9], max_tokens=5))
    engine.step()
    engine.reserve("g", make_job("a", [1, 2, 3, 4], max_tokens=5))
    engine.step()
    engine.events.clear()
    engine.start("g", TokenDelta("a", 0, 0, token_ids))
    finish(engine)
    assert [e.key for e in answers(engine, Failed)] == [("a", 0)]  # type: ignore[union-attr]
    assert {e.key for e in answers(engine, Generated)} == {("other", 0)}  # type: ignore[union-attr]
