"""Steps that are launched while one runs: the tokens are those of one step after the other, and nothing is used too
early."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import cancellations, request_table
from kvferry.engine.block_interfaces import GRANT, SHIP
from kvferry.engine.engine import Engine
from kvferry.engine.events import Computed, Event, Failed, Generated, ReservationFailed, Reserved
from kvferry.engine.loop import EngineLoop
from kvferry.engine.request_states import State
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.messages import Job, TokenDelta
from tests.engine.beside import Eager, Lazy
from tests.toy import VOCAB, ToyModel, expected, finish, make_engine, make_job, runner_of, tokens_of

BLOCK = 4
KINDS = [Eager, Lazy]


def lazy(**limits: int) -> tuple[Engine, Lazy]:
    engine = make_engine(runs=Lazy, **limits)  # type: ignore[arg-type]
    assert isinstance(engine.runner, Lazy)
    return engine, engine.runner


def flying(engine: Engine) -> bool:
    return bool(engine.stepper.ahead)


def until_flying(engine: Engine) -> None:
    while not flying(engine):
        assert engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_a_step_ahead_of_their_tokens(kind: type[Eager]) -> None:
    engine = make_engine(runs=kind)
    prompts = {name: [number + 1] * 5 for number, name in enumerate("abc")}
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.add(make_job(name, prompt, 20 + number))
    finish(engine)
    runner = engine.runner
    assert isinstance(runner, kind)
    assert {name: tokens_of(engine, name) for name in prompts} == {
        name: expected(prompt, 20 + number) for number, (name, prompt) in enumerate(prompts.items())
    }
    assert runner.behind >= 18
    assert runner.launched - runner.behind <= 2, "the device had nothing to do between two steps"
    assert set(runner.streams) == {3, 2, 1}, "who ends by its length is not computed further"


def test_a_device_that_does_not_compute_beside_its_host_is_given_one_step_at_a_time() -> None:
    engine = make_engine()
    assert engine.runner.launch is None
    engine.add(make_job("a", [1, 2, 3], 20))
    while engine.has_work():
        engine.step()
        assert not flying(engine)


def test_a_stream_that_ended_loses_what_was_computed_further() -> None:
    engine, runner = lazy()
    stop = expected([1, 2, 3], 9)[8]
    engine.add(make_job("stops", [1, 2, 3], 40, stop_token_ids=(stop,)))
    engine.add(make_job("goes on", [4, 5, 6], 30))
    finish(engine)
    assert tokens_of(engine, "stops") == expected([1, 2, 3], 9)
    assert tokens_of(engine, "goes on") == expected([4, 5, 6], 30)
    assert not runner.stream.queue
    told = [e for e in engine.events if isinstance(e, Generated) and e.key[0] == "stops"]
    assert (len(told), told[-1].delta.finish_reason) == (9, "stop")


def test_once_all_have_ended_nothing_is_in_flight() -> None:
    engine, runner = lazy()
    stop = expected([1, 2, 3], 9)[8]
    engine.add(make_job("a", [1, 2, 3], 40, stop_token_ids=(stop,)))
    while engine.has_work():
        engine.step()
    assert runner.behind
    assert not flying(engine)
    assert not runner.stream.queue
    engine.check_integrity()


@pytest.mark.parametrize(
    "asked",
    [{"logprobs": 2}, {"bad_words": ((1, 2),)}],
    ids=str,
)
def test_what_a_stream_is_to_draw_may_need_its_last_token(asked: dict[str, Any]) -> None:
    engine, runner = lazy()
    engine.add(make_job("a", [1, 2, 3], 12, **asked))
    engine.add(make_job("plain", [4, 5, 6], 12))
    finish(engine)
    assert not runner.launched
    alone = make_engine()
    alone.add(make_job("a", [1, 2, 3], 12, **asked))
    finish(alone)
    assert tokens_of(engine, "a") == tokens_of(alone, "a")


class Undecided(ToyModel):
    """Its tokens are few, and their logits near each other."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        favoured = hidden[:, 0].long()[:, None]
        return 1.0 + 0.1 * ((favoured + torch.arange(VOCAB)) % 5) - 0.05 * torch.arange(VOCAB)


PENALTIES: list[dict[str, object]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"repetition_penalty": 0.8, "presence_penalty": 1.5},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", PENALTIES, ids=str)
def test_penalties_count_the_token_that_the_host_does_not_know(kind: type[Eager], asked: dict[str, Any]) -> None:
    """With logits near enough for a penalty to decide."""
    engine, alone = make_engine(runs=kind), make_engine()
    for each in (engine, alone):
        each.runner.model = Undecided()  # type: ignore[misc]
        each.add(make_job("a", [1, 2, 3], 30, **asked))
        each.add(make_job("plain", [4, 5, 6], 30))
        finish(each)
    assert isinstance(engine.runner, kind)
    assert engine.runner.behind >= 25
    made = tokens_of(alone, "a")
    assert tokens_of(engine, "a") == made
    assert tokens_of(engine, "plain") == tokens_of(alone, "plain")
    without = make_engine()
    without.runner.model = Undecided()  # type: ignore[misc]
    without.add(make_job("a", [1, 2, 3], 30))
    finish(without)
    assert tokens_of(without, "a") != made


def test_drafts_need_the_last_token() -> None:
    engine = make_engine(runs=Lazy, drafts=3)
    engine.add(make_job("a", [1, 2, 3], 12))
    finish(engine)
    assert isinstance(engine.runner, Lazy)
    assert not engine.runner.launched


def test_a_command_is_awaited_by_no_further_step() -> None:
    """What is in flight is collected, and nothing behind it is launched meanwhile."""
    engine, runner = lazy()
    engine.add(make_job("a", [1, 2, 3], 40))
    until_flying(engine)
    engine.stepper.suspended.called = lambda: True
    launched = runner.launched
    engine.step()
    assert not flying(engine)
    assert runner.launched == launched


def test_what_waits_for_a_seat_has_it_as_soon_as_there_is_one() -> None:
    """And while there is none, it does not keep the device waiting."""
    engine, runner = lazy(seqs=2)
    stop = expected([1, 2, 3], 9)[8]
    engine.add(make_job("a", [1, 2, 3], 40, stop_token_ids=(stop,)))
    engine.add(make_job("b", [4, 5, 6], 14))
    engine.add(make_job("waits", [7, 8, 9], 3))
    while not tokens_of(engine, "waits"):
        assert engine.step()
        assert runner.behind or not tokens_of(engine, "a")[3:]
    assert runner.behind > 4
    assert tokens_of(engine, "a") == expected([1, 2, 3], 9)
    assert len(tokens_of(engine, "b")) <= 11, "one step late at most"
    finish(engine)


def test_who_waits_behind_those_who_run_again_does_not_keep_the_device_waiting() -> None:
    engine, runner = lazy(seqs=2)
    stop = expected([1, 2, 3], 9)[8]
    engine.add(make_job("a", [1, 2, 3], 40, stop_token_ids=(stop,)))
    engine.add(make_job("b", [4, 5, 6], 40))
    engine.add(make_job("next", [7, 8, 9], 20))
    engine.add(make_job("waits", [7, 8, 9, 10], 20))
    while not tokens_of(engine, "next"):
        assert engine.step()
    behind = runner.behind
    while len(tokens_of(engine, "next")) < 12:
        assert engine.step()
    assert engine.request_table.waiting
    assert runner.behind >= behind + 9
    finish(engine)


def test_one_past_its_deadline_is_dropped_with_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellations, "LATE_S", 0.0)
    engine, runner = lazy()
    engine.add(make_job("a", [1, 2, 3], 40))
    engine.add(make_job("b", [4, 5, 6], 40))
    until_flying(engine)
    hasty = engine.request_table.find(("a", 0))
    assert hasty is not None
    hasty.job = replace(hasty.job, deadline_s=-1.0)
    seen: list[bool] = []
    remove = engine.scheduler.remove
    engine.scheduler.remove = lambda request: (seen.append(bool(runner.stream.queue)), remove(request))[1]  # type: ignore[method-assign]
    engine.step()
    assert seen == [False]
    assert [e.key[0] for e in engine.events if isinstance(e, Failed)] == ["a"]
    engine.scheduler.remove = remove  # type: ignore[method-assign]
    finish(engine)
    assert tokens_of(engine, "b") == expected([4, 5, 6], 40)


class Unsound(ToyModel):
    """Its logits behind a token are no numbers, once that is `after`."""

    after = -1
    least = 0
    """Of all ids that it was given: one that is no token would be looked up outside of a GPU's memory."""

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan):  # type: ignore[no-untyped-def]
        self.least = min(self.least, int(token_ids.min()))
        found = super().next_logits(token_ids, kv, plan)
        found.values[token_ids == self.after] = torch.nan
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_token_can_be_drawn_what_follows_is_nobodys(kind: type[Eager]) -> None:
    engine = make_engine(runs=kind)
    model = Unsound()
    engine.runner.model = model  # type: ignore[misc]
    made = expected([1, 2, 3], 12)
    model.after = next(token for token in made[4:] if token not in expected([4, 5, 6], 20))
    engine.add(make_job("a", [1, 2, 3], 20))
    engine.add(make_job("b", [4, 5, 6], 20))
    finish(engine)
    assert tokens_of(engine, "a") == made[: made.index(model.after) + 1]
    assert tokens_of(engine, "b") == expected([4, 5, 6], 20)
    assert [(e.key[0], e.error.code) for e in engine.events if isinstance(e, Failed)] == [("a", "model_failed")]
    assert model.least == 0


@pytest.mark.parametrize("when", ["launched", "launched behind", "collected"])
def test_one_that_fails_is_computed_again_by_itself(when: str) -> None:
    engine, runner = lazy()
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        engine.add(make_job(name, prompt, 20))
    until_flying(engine)
    left = [1]

    def breaks(*given: object) -> bool:
        return bool(left) and (left.pop() > 0)

    launch = runner._launch

    def failing(slices, behind):  # type: ignore[no-untyped-def]
        if (when == "launched behind" and behind is not None and breaks()) or (
            when == "launched" and behind is None and breaks()
        ):
            raise torch.OutOfMemoryError("a moment")
        flight = launch(slices, behind)
        if when == "collected" and breaks():
            wait = flight.drawn.wait

            def broken() -> list[int]:
                wait()
                raise RuntimeError("the device says so")

            flight.drawn.wait = broken  # type: ignore[method-assign]
        return flight

    runner._launch = failing  # type: ignore[method-assign]
    if when == "launched":
        engine.stepper.collect()
    finish(engine)
    assert not left
    assert tokens_of(engine, "a") == expected([1, 2, 3], 20)
    assert tokens_of(engine, "b") == expected([4, 5, 6], 20)
    assert not [e for e in engine.events if isinstance(e, Failed)]


def test_who_loses_its_blocks_in_flight_draws_the_same_later() -> None:
    engine, _ = lazy()
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        engine.add(make_job(name, prompt, 20))
    until_flying(engine)
    engine.scheduler.preempt(engine.request_table.running[0])
    finish(engine)
    assert tokens_of(engine, "a") == expected([1, 2, 3], 20)
    assert tokens_of(engine, "b") == expected([4, 5, 6], 20)


def test_equal_streams_exchange_their_blocks_in_flight() -> None:
    """A block that became full is another one by the time its step is collected; the step in flight knows the old one,
    which a stream that grows may have next."""
    engine, runner = lazy(budget=64)
    prompt = [1, 2, 3, 4, 5]
    for name in "abc":
        engine.add(make_job(name, prompt, 40))
    engine.add(make_job("other", [9, 8], 40))
    finish(engine)
    assert runner.behind > 30
    assert all(tokens_of(engine, name) == expected(prompt, 40) for name in "abc")
    assert tokens_of(engine, "other") == expected([9, 8], 40)


def test_the_loops_commands_find_nothing_in_flight() -> None:
    engine, runner = lazy()
    seen: list[tuple[bool, bool]] = []
    made: list[int] = []
    over = threading.Event()

    def told(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Generated):
                made.extend(event.delta.token_ids)
                if event.delta.index % 5 == 0:
                    loop.submit(lambda engine: seen.append((flying(engine), bool(runner.stream.queue))))
                if event.delta.finish_reason:
                    over.set()

    loop = EngineLoop(engine, told)
    loop.start()
    loop.submit(lambda engine: engine.add(make_job("a", [1, 2, 3], 100)))
    assert over.wait(60)
    loop.stop()
    assert made == expected([1, 2, 3], 100)
    assert runner.behind > 30
    assert len(seen) >= 19
    assert set(seen) == {(False, False)}


# Random lives.

PARAMS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 20, "min_tokens": 3},
    {"stop_token_ids": tuple(range(0, VOCAB, 9))},
    {"temperature": 1.0, "seed": 7, "logit_bias": ((3, 2.0),), "stop_token_ids": tuple(range(0, VOCAB, 7))},
    {"frequency_penalty": 0.7},
    {"logprobs": 1},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5},
]


def prompt_of(n: int) -> list[int]:
    return random.Random(n % 3).choices(range(VOCAB), k=1 + 2 * n)


def job_of(name: str, n: int, attempt: int = 0) -> Job:
    params = {"temperature": 0.0} | PARAMS[n % len(PARAMS)]
    job = make_job(name, prompt_of(n), 3 + 3 * n, attempt=attempt)
    return replace(job, work=replace(job.work, params=replace(job.params, **params)))  # type: ignore[arg-type]


@cache
def alone(n: int) -> list[int]:
    """What is drawn of it one step after the other, with nobody else."""
    engine = make_engine()
    engine.add(job_of("a", n))
    finish(engine)
    return tokens_of(engine, "a")


class Life:
    """An engine whose steps run late, under commands as its loop gives them, between a link that touches what it may at
    any moment."""

    def __init__(self, kind: type[Eager], blocks: int, caching: bool, seed: int) -> None:
        self.engine = make_engine(num_blocks=blocks, seqs=4, caching=caching, runs=kind)
        self.runner = self.engine.runner
        self.kv = runner_of(self.engine).kv
        self.chance = random.Random(seed)
        self.serial = 0
        self.of: dict[tuple[str, int], int] = {}
        self.drawn: dict[tuple[str, int], list[int]] = {}
        self.ended: Counter[tuple[str, int]] = Counter()
        self.granted: dict[str, tuple[Reserved, int]] = {}
        self.ships: dict[int, tuple[int, set[int]]] = {}
        self._watch()

    def _watch(self) -> None:
        """Nobody but the device's own steps takes a block while one of them is in flight."""
        hold = self.engine.pool.holds.hold

        def watched(owner: object, reason: str, block_ids: list[int]) -> None:
            stream = getattr(self.runner, "stream", None)
            assert reason not in (GRANT, SHIP) or stream is None or not stream.queue
            hold(owner, reason, block_ids)  # type: ignore[arg-type]

        self.engine.pool.holds.hold = watched  # type: ignore[method-assign, assignment]

    def command(self, call: Callable[[], None]) -> None:
        self.engine.stepper.collect()
        assert not flying(self.engine)
        call()
        self.engine.stepper.admit_grants()
        self.look()

    def add(self, n: int) -> None:
        self.serial += 1
        job = job_of(f"r{n}", n, self.serial)
        self.of[job.request_id, self.serial] = n
        if n % 4 == 3:
            self.ships[self.serial] = (n, set())
            self.command(lambda: self.engine.add(job, transfer=self.serial, prefill_only=True))
        else:
            self.command(lambda: self.engine.add(job))

    def reserve(self, n: int) -> None:
        self.serial += 1
        job = job_of(f"r{n}", n, self.serial)
        self.of[job.request_id, self.serial] = n
        self.command(lambda: self.engine.reserve(f"g{self.serial}:{n}", job))

    def land(self, ok: bool) -> None:
        if not self.granted:
            return
        owner = self.chance.choice(sorted(self.granted))
        reserved, n = self.granted.pop(owner)
        if not ok:
            self.command(lambda: self.engine.withdraw(owner, TransferFailed("lost")))
            self.look()
            self.engine.transfer_holds.grant_quiet(owner)
            return
        prompt = prompt_of(n)
        for index, block_id in enumerate(reserved.block_ids, reserved.first_block):
            for slot, token in enumerate(prompt[BLOCK * index : BLOCK * (index + 1)]):
                self.kv[block_id, 0, :, 0, slot, 0] = token
        self.command(lambda: self.engine.start(owner, TokenDelta(f"r{n}", 0, 0, tuple(alone(n)[:1]))))

    def step(self) -> None:
        if self.engine.has_work():
            self.engine.step()
        self.look()

    def look(self) -> None:
        """Take the news as link and loop do, at once, whatever is in flight."""
        for event in self.engine.events:
            if isinstance(event, Generated):
                self.drawn.setdefault(event.key, []).extend(event.delta.token_ids)
                self.ended[event.key] += event.delta.finish_reason is not None
            elif isinstance(event, Failed):
                self.ended[event.key] += 1
            elif isinstance(event, Computed):
                n, sent = self.ships[event.transfer]
                for index, block_id in event.blocks:
                    tokens = prompt_of(n)[BLOCK * index : BLOCK * (index + 1)]
                    assert self.kv[block_id, 0, 1, 0, : len(tokens), 0].tolist() == tokens
                    assert index not in sent
                    sent.add(index)
            elif isinstance(event, Reserved):
                self.granted[str(event.owner)] = (event, int(str(event.owner).split(":")[1]))
                self.kv[list(event.block_ids)] = -5.0  # the link writes whenever it likes
            elif isinstance(event, ReservationFailed):
                if event.owner in self.granted:
                    del self.granted[str(event.owner)]
                if event.granted:
                    self.engine.transfer_holds.grant_quiet(event.owner)
        self.engine.events.clear()
        self._check()

    def _check(self) -> None:
        self.engine.pool.check_integrity()
        request_table.check_integrity(self.engine.request_table)
        for request in self.engine.request_table.running:
            for at in range(request.computed_len):
                kept = self.kv[request.block_ids[at // BLOCK], 0, 1, 0, at % BLOCK, 0]
                assert int(kept) == request.token_ids[at], f"K/V of {request.key} at {at}"

    def arrive(self) -> None:
        """Ships whose prompts are computed have arrived: they would keep blocks that others wait for."""
        for transfer in list(self.ships):
            if self.engine.request_table.find((f"r{self.ships[transfer][0]}", transfer)) is None:
                self.engine.transfer_holds.ship_quiet(transfer)
                del self.ships[transfer]

    def end(self) -> None:
        while self.engine.has_work():
            self.step()
            if not self.engine.has_work() or self.engine.scheduler.refused is not None:
                self.land(ok=True)
                self.arrive()
        while self.granted:
            self.land(ok=False)
        while self.engine.has_work():
            self.step()
            self.arrive()
        for transfer in list(self.ships):
            self.engine.transfer_holds.ship_quiet(transfer)
        self.engine.check_integrity()
        assert not flying(self.engine)


commands = st.lists(
    st.tuples(st.sampled_from(["add", "add", *["step"] * 6, "cancel", "reserve", "land", "fail"]), st.integers(0, 9)),
    max_size=70,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(commands, st.integers(14, 40), st.booleans(), st.integers(0, 2**16))
def test_tokens_are_those_of_one_step_after_the_other_whatever_happens(
    kind: type[Eager], ops: list[tuple[str, int]], blocks: int, caching: bool, seed: int
) -> None:
    life = Life(kind, blocks, caching, seed)
    cancelled: set[tuple[str, int]] = set()
    for op, n in ops:
        if op == "add":
            life.add(n)
        elif op == "reserve":
            life.reserve(n)
        elif op == "cancel":
            cancelled |= {r.key for r in life.engine.request_table if r.key[0] == f"r{n}"}
            life.command(partial(life.engine.cancel, f"r{n}", life.serial))
        elif op in ("land", "fail"):
            life.land(op == "land")
        else:
            for _ in range(1 + n // 3):
                life.step()
    life.end()
    for key, n in life.of.items():
        drawn = life.drawn.get(key, [])
        whole = alone(n)
        assert drawn in (whole[: len(drawn)], whole[1 : len(drawn) + 1]), (key, n)
        assert life.ended[key] <= 1
        if life.ended[key] and key not in cancelled:
            assert drawn[-1:] == whole[-1:] or n % 4 == 3, (key, n)


def test_random_lives_have_steps_in_flight() -> None:
    """What the test above is about takes place in it."""
    behind = dropped = preempted = 0
    for seed in range(12):
        life = Life(Lazy, 16, True, seed)
        for _ in range(6):
            life.add(life.chance.choice([0, 2, 4, 5, 8, 9]))
            for _ in range(life.chance.randrange(12)):
                life.step()
                request = next(iter(life.engine.request_table.running), None)
                if request is not None and flying(life.engine) and life.chance.random() < 0.1:
                    life.command(partial(life.engine.cancel, *request.key))
                    dropped += request.state is State.DONE
        life.end()
        behind += life.runner.behind  # type: ignore[attr-defined]
        preempted += life.engine.scheduler.preempted_total
    assert behind > 50
    assert dropped > 3
    assert preempted
