"""The engine thread: commands in, events out in order, errors contained, books checked when idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from kvferry.engine import audit_schedule, cancellations, suspended_steps
from kvferry.engine import loop as engine_loop
from kvferry.engine.audit_schedule import audit
from kvferry.engine.block_interfaces import GRANT
from kvferry.engine.engine import Engine
from kvferry.engine.events import BlocksChanged, Event, Failed, Generated
from kvferry.engine.loop import EngineLoop
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, SuspendedPass
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.protocol.messages import Job
from tests.toy import HeldModel, ToyModel, expected, make_engine, make_job
from tests.waiting import wait_for


class Outbox:
    """Collects events; waits for conditions on them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[list[Event]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.events), timeout=10)

    def tokens(self, name: str) -> list[int]:
        return [t for e in self.events if isinstance(e, Generated) and e.key[0] == name for t in e.delta.token_ids]


@pytest.fixture
def running() -> Iterator[tuple[Engine, EngineLoop, Outbox]]:
    engine, outbox = make_engine(), Outbox()
    loop = EngineLoop(engine, outbox)
    loop.start()
    yield engine, loop, outbox
    loop.stop()
    engine.check_integrity()


def test_commands_run_on_the_thread_and_events_come_in_order(running: tuple[Engine, EngineLoop, Outbox]) -> None:
    _, loop, outbox = running
    for name in ("a", "b"):
        loop.submit(lambda engine, name=name: engine.add(make_job(name, [1, 2, 3, 4, 5])))  # type: ignore[misc]
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) for e in events) == 16)
    assert outbox.tokens("a") == outbox.tokens("b") == expected([1, 2, 3, 4, 5], 8)


def test_a_command_that_fails_stops_nothing(running: tuple[Engine, EngineLoop, Outbox]) -> None:
    _, loop, outbox = running
    loop.submit(lambda engine: 1 // 0)  # type: ignore[arg-type, return-value]
    loop.submit(lambda engine: engine.add(make_job("a", [1, 2, 3])))
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) for e in events) == 8)


def test_a_broken_step_fails_its_requests_and_the_next_ones_run(
    running: tuple[Engine, EngineLoop, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loop, outbox = running
    run, left = engine.runner.run, [1, 2]

    def twice(*step: object) -> object:
        if left:
            left.pop()
            raise RuntimeError("no kernel for it")
        return run(*step)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "run", twice)
    loop.submit(lambda engine: engine.add(make_job("a", [1, 2, 3])))
    outbox.wait_for(lambda events: any(isinstance(e, Failed) for e in events))
    failure = next(e for e in outbox.events if isinstance(e, Failed))
    assert (failure.key, failure.error.retryable) == (("a", 0), True)
    loop.submit(lambda engine: engine.add(make_job("b", [1, 2, 3])))
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) for e in events) == 8)


def test_what_is_past_its_deadline_is_dropped(
    running: tuple[Engine, EngineLoop, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellations, "LATE_S", 0.05)
    engine, loop, outbox = running
    run = engine.runner.run

    def slow(*step: object) -> object:
        time.sleep(0.05)
        return run(*step)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "run", slow)
    hasty = replace(make_job("a", [1, 2, 3], max_tokens=200), deadline_s=0.2)
    begin(loop, hasty, make_job("b", [1, 2, 3], max_tokens=20))
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) and e.key[0] == "b" for e in events) == 20)
    (failure,) = (e for e in outbox.events if isinstance(e, Failed))
    assert (failure.key, failure.error.code) == (("a", 0), "deadline_exceeded")


def test_a_turn_that_hangs_keeps_its_mark(running: tuple[Engine, EngineLoop, Outbox]) -> None:
    _, loop, _ = running
    began, go = threading.Event(), threading.Event()
    wait_for(lambda: loop.mark is None)
    loop.submit(lambda engine: (began.set(), go.wait(10)))  # type: ignore[arg-type, return-value]
    assert began.wait(10)
    mark = loop.mark
    assert mark is not None
    loop.submit(lambda engine: None)
    assert not go.wait(0.1)
    assert loop.mark == mark
    go.set()
    wait_for(lambda: loop.mark is None)


def test_a_request_that_waits_for_room_starts_when_room_comes(running: tuple[Engine, EngineLoop, Outbox]) -> None:
    _, loop, outbox = running
    loop.submit(lambda engine: engine.reserve("g", make_job("big", list(range(100)) * 2)))
    outbox.wait_for(lambda events: len(events) > 0)
    loop.submit(lambda engine: engine.add(make_job("a", list(range(80)))))
    assert loop.load.granted_blocks == 50
    loop.submit(lambda engine: engine.cancel("big", 0))
    loop.submit(lambda engine: engine.transfer_holds.grant_quiet("g"))
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) for e in events) == 8)


@pytest.fixture
def held(running: tuple[Engine, EngineLoop, Outbox]) -> Iterator[HeldModel]:
    """The running engine's model."""
    model = running[0].runner.model = HeldModel()
    yield model
    model.release()


class Held(ToyModel):
    """Its first pass lasts until it is suspended."""

    resumable = True

    def __init__(self) -> None:
        self.begun = threading.Event()

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        if not self.begun.is_set():
            self.begun.set()
            wait_for(lambda: not keep_going())
            raise ForwardAbandoned(SuspendedPass(1, token_ids.float(), token_ids.float()))
        assert halfway is None or halfway.x.tolist() == token_ids.tolist()
        return super().forward(token_ids, kv, plan)


def begin(loop: EngineLoop, *jobs: Job) -> None:
    """All in one step."""
    loop.submit(lambda engine: [engine.add(job) for job in jobs])  # type: ignore[arg-type, return-value]


def test_what_is_urgent_is_told_to_the_runner_at_once(
    running: tuple[Engine, EngineLoop, Outbox], held: HeldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loop, _ = running
    told = threading.Event()
    monkeypatch.setattr(engine.runner, "mark_urgent", told.set)
    begin(loop, make_job("a", [1, 2, 3]))
    assert held.begun.wait(10)
    loop.submit(lambda engine: None)
    assert not told.is_set()
    loop.submit(lambda engine: None, urgent=True)
    assert told.is_set(), "in the middle of a step"


def test_commands_are_taken_in_the_middle_of_a_step_of_prompts(
    running: tuple[Engine, EngineLoop, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model can take it up again."""
    engine, loop, outbox = running
    monkeypatch.setattr(suspended_steps, "MIN_S", 0.0)
    engine.runner.model = Held()
    begin(loop, make_job("long", [1, 2, 3, 4, 5], 2))
    assert engine.runner.model.begun.wait(10)
    begin(loop, replace(make_job("short", [6, 7, 8], 2), newcomer=True))
    outbox.wait_for(lambda events: any(isinstance(e, Generated) for e in events))
    assert next(e.key[0] for e in outbox.events if isinstance(e, Generated)) == "short"
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) for e in events) == 4)
    assert (outbox.tokens("long"), outbox.tokens("short")) == (expected([1, 2, 3, 4, 5], 2), expected([6, 7, 8], 2))


def test_a_step_whose_requests_are_all_cancelled_ends_early(
    running: tuple[Engine, EngineLoop, Outbox], held: HeldModel
) -> None:
    engine, loop, outbox = running
    begin(loop, make_job("a", [1, 2, 3, 4, 5]), make_job("b", [6, 7, 8]))
    assert held.begun.wait(10)
    loop.cancel("a", 0)
    loop.cancel("b", 0)
    outbox.wait_for(lambda events: sum(isinstance(e, Failed) for e in events) == 2)
    wait_for(lambda: not loop.busy)
    assert engine.pool.free_blocks == engine.pool.num_blocks, "nothing of the step can be found"
    held.release()
    begin(loop, make_job("c", [1, 2, 3, 4, 5]))
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) for e in events) == 8)
    assert outbox.tokens("c") == expected([1, 2, 3, 4, 5], 8)


def test_a_step_goes_on_for_whoever_stays(running: tuple[Engine, EngineLoop, Outbox], held: HeldModel) -> None:
    """Cancelled are attempts up to the one named: a later one of the same request stays."""
    _, loop, outbox = running
    begin(loop, make_job("a", [1, 2, 3]), make_job("b", [6, 7, 8], attempt=2))
    assert held.begun.wait(10)
    loop.cancel("a", 0)
    loop.cancel("b", 1)
    asked = held.asked
    wait_for(lambda: held.asked > asked + 3)
    held.release()
    outbox.wait_for(lambda events: sum(isinstance(e, Generated) for e in events) >= 8)
    wait_for(lambda: not loop.busy)
    assert outbox.tokens("b") == expected([6, 7, 8], 8)
    assert [e.key for e in outbox.events if isinstance(e, Failed)] == [("a", 0)]


def test_the_load_tells_of_work_before_its_first_step_ends(
    running: tuple[Engine, EngineLoop, Outbox], held: HeldModel
) -> None:
    _, loop, _ = running
    begin(loop, make_job("a", [1, 2, 3]))
    assert held.begun.wait(10)
    assert (loop.load.waiting_requests + loop.load.running_requests, loop.load.waiting_tokens) == (1, 3)
    loop.cancel("a", 0)
    wait_for(lambda: not loop.busy)
    assert (loop.load.waiting_requests + loop.load.running_requests, loop.load.waiting_tokens) == (0, 0)


def test_books_that_do_not_balance_are_a_fault(
    running: tuple[Engine, EngineLoop, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loop, outbox = running
    monkeypatch.setattr(audit_schedule, "EVERY_S", 0.0)
    lost: list[int] = []
    loop.submit(lambda engine: lost.append(engine.pool._free.take()))
    loop.submit(lambda engine: engine.add(make_job("a", [1, 2, 3], max_tokens=1)))
    outbox.wait_for(lambda events: any(isinstance(e, Generated) for e in events))
    wait_for(lambda: loop.fault is not None)
    assert loop.fault == f"self-check failed: block {lost[0]} leaked or is free while held"
    loop.submit(lambda engine: engine.pool._free.put(lost[0]))
    wait_for(lambda: not loop.busy)


def test_a_command_waits_no_longer_than_a_turn_of_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass over a pool that takes many turns goes on between commands, and ends."""
    monkeypatch.setattr(audit_schedule, "EVERY_S", 0.0)
    monkeypatch.setattr(audit_schedule, "PAUSE_S", 0.0)
    engine, passes, pieces = make_engine(num_blocks=200_000), [0], [0]

    def watched(engine: Engine) -> Iterator[None]:
        for _ in audit(engine):
            pieces[0] += 1
            yield
        passes[0] += 1

    monkeypatch.setattr(engine_loop, "audit", watched)
    monkeypatch.setattr(audit_schedule, "TURN_S", 0.0001)
    loop = EngineLoop(engine, Outbox())
    loop.start()
    answered, seen = threading.Event(), set()

    def answer(engine: Engine) -> None:
        seen.add(pieces[0])
        answered.set()

    while not passes[0]:
        answered.clear()
        loop.submit(answer)
        assert answered.wait(10)
    loop.stop()
    assert loop.fault is None
    assert len(seen) > 3, "commands came in the middle of the pass"


def test_a_thread_that_ends_is_a_fault() -> None:
    def prepare() -> None:
        raise RuntimeError("no device")

    loop = EngineLoop(make_engine(), lambda events: None, prepare)
    loop.start()
    wait_for(lambda: loop.fault == "the engine thread ended: no device")
    loop.stop()


def test_the_loop_is_busy_from_submission_to_the_last_news(running: tuple[Engine, EngineLoop, Outbox]) -> None:
    _, loop, outbox = running
    assert not loop.busy
    for name in ("a", "b", "c"):
        loop.submit(lambda engine, name=name: engine.add(make_job(name, [1, 2, 3])))  # type: ignore[misc]
        assert loop.busy
        wait_for(lambda: not loop.busy)
        assert len(outbox.tokens(name)) == 8


def test_what_commands_alone_evict_is_told_of(running: tuple[Engine, EngineLoop, Outbox]) -> None:
    """An index counted on it until the next step, of which an idle node has none."""
    _, loop, outbox = running
    loop.submit(lambda engine: engine.add(make_job("a", [1, 2, 3, 4, 5])))
    outbox.wait_for(lambda events: any(isinstance(event, BlocksChanged) and event.stored for event in events))
    wait_for(lambda: not loop.busy)

    def others(engine: Engine) -> None:
        engine.pool.release("others", GRANT, engine.pool.acquire("others", GRANT, [], engine.pool.available) or ())

    loop.submit(others)
    wait_for(lambda: not loop.busy)
    told = [event for event in outbox.events if isinstance(event, BlocksChanged)]
    gone = {each for event in told for each in event.removed}
    assert gone == {each for event in told for each in event.stored}
