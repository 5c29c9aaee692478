"""Requests with a grammar: outputs match it on every path, replayed wherever they go on, and nobody else waits."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Generated, ReservationFailed
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.loop import EngineLoop
from kvferry.engine.request_states import State
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate, Grammar
from kvferry.structured_output.compile_threads import CompileThreads, Inline
from tests.listed_grammars import ListedCompiler, ListedMatcher, listed
from tests.toy import VOCAB, expected, make_engine, make_job
from tests.waiting import wait_for

EOS = 2
OUTPUTS = ([5, 6, 7, 8, 9, 10], [5, 6, 50, 51], [60])
GRAMMAR = listed(*OUTPUTS)


def job_of(name: str, prompt: list[int], grammar: Grammar | None = GRAMMAR, **fields: object) -> Job:
    fields = {"max_tokens": 12, "temperature": 0.0, "eos_token_ids": (EOS,), **fields}
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return replace(make_job(name, prompt), work=Generate(params, grammar))


def engine_of(compiler: ListedCompiler | None = None, **limits: Any) -> Engine:
    masks = GrammarMasks(compiler or ListedCompiler(EOS), VOCAB, Inline(), Inline())
    return make_engine(masks=masks, **limits)


def run(engine: Engine) -> dict[str, list[int]]:
    while engine.has_work():
        assert engine.step(), "the engine is stuck"
    found: dict[str, list[int]] = {}
    for event in engine.events:
        if isinstance(event, Generated):
            found.setdefault(event.key[0], []).extend(event.delta.token_ids)
    engine.check_integrity()
    return found


def finish(engine: Engine, name: str) -> tuple[str | None, int | None]:
    deltas = [e.delta for e in engine.events if isinstance(e, Generated) and e.key[0] == name]
    return deltas[-1].finish_reason, deltas[-1].stop_token


def failures(engine: Engine) -> dict[str, str]:
    return {e.key[0]: e.error.code for e in engine.events if isinstance(e, Failed)}


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"logit_bias": ((70, 100.0),)}]
)
def test_the_output_is_one_of_those_the_grammar_lists_and_ends_with_stop(params: dict[str, Any]) -> None:
    engine = engine_of()
    for seed in range(6):
        engine.add(job_of(f"r{seed}", [1, 2, 3 + seed], seed=seed, **params))
    engine.add(make_job("free", [4, 4, 4]))
    found = run(engine)
    assert found.pop("free") == expected([4, 4, 4], 8)
    assert all([*tokens[:-1]] in [*map(list, OUTPUTS)] and tokens[-1] == EOS for tokens in found.values())
    assert {finish(engine, name) for name in found} == {("stop", EOS)}


def test_an_output_that_is_closed_in_time_says_so() -> None:
    grammar, compiler = listed([5, 6, 7, 8, 9, 10], [5, 6, 50]), ListedCompiler(EOS)
    compiler.closes = True
    engine = engine_of(compiler)
    engine.add(job_of("cut", [1, 2, 3], grammar, max_tokens=4, logit_bias=((7, 50.0),)))
    engine.add(job_of("free", [1, 2, 3], grammar, max_tokens=9, logit_bias=((7, 50.0),)))
    assert run(engine) == {"cut": [5, 6, 50, EOS], "free": [5, 6, 7, 8, 9, 10, EOS]}
    assert [finish(engine, name) for name in ("cut", "free")] == [("closed", EOS), ("stop", EOS)]


def test_the_greedy_shortcut_does_not_pass_the_mask() -> None:
    """The model favours a token that the grammar forbids."""
    engine = engine_of()
    engine.add(job_of("a", [1, 2, 3], listed([11, 12])))
    assert expected([1, 2, 3], 1) != [11]
    assert run(engine) == {"a": [11, 12, EOS]}


def test_min_tokens_and_ignore_eos_give_way_where_the_grammar_can_only_end() -> None:
    engine = engine_of()
    engine.add(job_of("early", [1], listed([7], [7, 8, 9]), min_tokens=3))
    engine.add(job_of("ignored", [2], listed([7], [7, 8]), ignore_eos=True))
    engine.add(job_of("short", [3], listed([7]), min_tokens=9))
    found = run(engine)
    assert found == {"early": [7, 8, 9, EOS], "ignored": [7, 8, EOS], "short": [7, EOS]}
    assert {finish(engine, name)[0] for name in found} == {"stop"}


def test_max_tokens_cuts_the_output() -> None:
    engine = engine_of()
    engine.add(job_of("a", [1], listed([5, 6, 7]), max_tokens=2))
    assert run(engine) == {"a": [5, 6]}
    assert finish(engine, "a") == ("length", None)


def test_a_preempted_request_goes_on_where_it_was() -> None:
    engine = engine_of(num_blocks=12, budget=64, beside=64)
    long = list(range(30, 50))
    for i in range(4):
        engine.add(job_of(f"r{i}", [i] * 10, listed(long), max_tokens=30))
    found = run(engine)
    assert engine.scheduler.preempted_total > 0
    assert all(tokens == [*long, EOS] for tokens in found.values())


def test_a_resumed_attempt_is_replayed() -> None:
    engine = engine_of()
    job = job_of("a", [1, 2, 3], listed([5, 6, 7, 8], [9, 9, 9]))
    engine.add(replace(job, attempt=1, token_ids=(1, 2, 3, 9, 9)))
    assert run(engine) == {"a": [9, EOS]}


def test_an_output_that_the_grammar_does_not_allow_ends_that_request_alone() -> None:
    engine = engine_of()
    engine.add(make_job("free", [4, 4, 4]))
    engine.add(replace(job_of("a", [1, 2, 3]), token_ids=(1, 2, 3, 77)))
    assert run(engine) == {"free": expected([4, 4, 4], 8)}
    assert failures(engine) == {"a": "grammar_failed"}


def test_a_grammar_that_cannot_be_read_is_refused_by_name() -> None:
    engine = engine_of()
    engine.add(job_of("bad", [1, 2], Grammar("regex", "a+")))
    engine.reserve("grant", job_of("reserved", [1, 2], Grammar("regex", "a+")))
    nobody = make_engine()
    nobody.add(job_of("none", [1, 2]))
    assert failures(engine) == {"bad": "invalid_request_error"}
    assert [e.error.code for e in engine.events if isinstance(e, ReservationFailed)] == ["invalid_request_error"]
    error = next(e.error for e in nobody.events if isinstance(e, Failed))
    assert "does not support grammars" in error.message
    assert not engine.request_table
    assert not nobody.request_table
    engine.check_integrity()
    nobody.check_integrity()


@pytest.mark.parametrize("early", [True, False])
def test_after_a_hand_over_the_first_token_is_replayed_whenever_the_grammar_comes(early: bool) -> None:
    """The token may come before the grammar is compiled, or after."""
    compiling: list[object] = []

    class Later:
        def submit(self, *jobs: object) -> None:
            compiling.extend(jobs)

    engine = make_engine(masks=GrammarMasks(ListedCompiler(EOS), VOCAB, Later(), Inline()))  # type: ignore[arg-type]
    engine.reserve("g", job_of("a", [1, 2, 3], listed([5, 6], [60, 61])))
    engine.step()
    if early:
        compiling.pop()()  # type: ignore[operator]
    request = engine.request_table.by_grant("g")
    assert request is not None
    engine.start("g", TokenDelta("a", 0, 0, (60,)))
    if not early:
        assert request.state is State.AWAITING
        compiling.pop()()  # type: ignore[operator]
    engine.transfer_holds.grant_quiet("g")
    assert run(engine) == {"a": [61, EOS]}


def test_a_late_mask_holds_up_its_own_request_alone() -> None:
    compiler = ListedCompiler(EOS)
    engine = make_engine(masks=GrammarMasks(compiler, VOCAB, Inline(), CompileThreads("late")))
    outbox: list[object] = []
    loop = EngineLoop(engine, outbox.extend)
    loop.start()
    go = compiler.held = threading.Event()
    go.set()
    loop.submit(lambda engine: engine.add(job_of("held", [1, 2, 3], listed([11, 12, 13]))))

    def tokens(name: str) -> list[int]:
        return [t for e in outbox if isinstance(e, Generated) and e.key[0] == name for t in e.delta.token_ids]

    wait_for(lambda: len(tokens("held")) == 4)
    go.clear()
    loop.submit(lambda engine: engine.add(make_job("warm", [9])))
    wait_for(lambda: len(tokens("warm")) == 8)
    compiler.held = None
    held = ListedMatcher.mask
    blocked = threading.Event()

    def slow(self: ListedMatcher, bits: object) -> None:
        if len(self._tokens) == 1:
            blocked.set()
            assert go.wait(10)
        held(self, bits)  # type: ignore[arg-type]

    ListedMatcher.mask = slow  # type: ignore[method-assign, assignment]
    try:
        loop.submit(lambda engine: engine.add(job_of("late", [1, 2, 3], listed([11, 12, 13]))))
        loop.submit(lambda engine: engine.add(make_job("free", [4, 4, 4], max_tokens=60)))
        wait_for(lambda: blocked.is_set() and len(tokens("free")) == 60)
        assert tokens("late") == [11]
        assert not go.is_set()
        go.set()
        wait_for(lambda: tokens("late") == [11, 12, 13, EOS])
        assert tokens("free") == expected([4, 4, 4], 60)
    finally:
        ListedMatcher.mask = held  # type: ignore[method-assign]
        loop.stop()
    engine.check_integrity()


def test_a_mask_follows_tokens_that_are_taken_back() -> None:
    masks = GrammarMasks(ListedCompiler(EOS), VOCAB, Inline(), Inline())
    tokens = [1, 5, 6]
    job = job_of("a", [1])
    mask = masks.open(GRAMMAR, job.params, tokens, 1, lambda error: None)
    assert allowed(mask.bits) == {7, 50}
    del tokens[-1:]
    masks.advance([mask])
    assert allowed(mask.bits) == {6}
    tokens[1:] = [60]
    mask.upto = 0
    mask.matcher.rollback(1)  # type: ignore[union-attr]
    mask.behind = 0
    masks.advance([mask])
    assert allowed(mask.bits) == {EOS}


def allowed(bits: object) -> set[int]:
    words = [int(word) & 0xFFFFFFFF for word in bits]  # type: ignore[attr-defined]
    return {32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1}
