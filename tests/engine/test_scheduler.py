"""Who runs, who waits and who gives way: seen through engines on the toy model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvferry.engine.events import Admitted, Failed, Generated, Reserved
from kvferry.protocol.messages import TokenDelta
from tests.toy import VOCAB, expected, finish, make_engine, make_job, runner_of, tokens_of


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def test_prompts_that_arrive_together_share_their_prefix() -> None:
    engine = make_engine(num_blocks=128, budget=16, beside=16)
    shared = prompt(80)
    for i in range(4):
        engine.add(make_job(f"r{i}", [*shared, i], max_tokens=1))
    finish(engine)
    hits = {e.key[0]: e.hit for e in engine.events if isinstance(e, Admitted)}
    assert hits["r0"] == 0
    assert all(hits[f"r{i}"] >= 64 for i in (1, 2, 3)), hits
    for i in range(4):
        assert tokens_of(engine, f"r{i}") == expected([*shared, i], 1)


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_fan_out_computes_its_cold_history_once_however_much_fits_into_a_step(budget: int) -> None:
    engine = make_engine(num_blocks=400, budget=budget, beside=budget, seqs=16)
    history = prompt(160)
    asked = {f"r{i}": [*history, *prompt(5 + i, seed=i + 1)] for i in range(12)}
    for name, tokens in asked.items():
        engine.add(make_job(name, tokens, max_tokens=2))
    engine.add(make_job("other", prompt(100, seed=99), max_tokens=1))
    engine.step()
    assert {e.key[0] for e in engine.events if isinstance(e, Admitted)} >= {"other"}, "it does not wait for them"
    finish(engine)
    hits = {e.key[0]: e.hit for e in engine.events if isinstance(e, Admitted)}
    assert sorted(hits.pop(name) for name in asked) == [0] + [160] * 11
    for name, tokens in asked.items():
        assert tokens_of(engine, name) == expected(tokens, 2)


def test_who_waits_for_a_prefix_computes_it_when_the_other_is_gone() -> None:
    engine = make_engine(num_blocks=400, budget=64, beside=64)
    history = prompt(160)
    engine.add(make_job("first", [*history, 1], max_tokens=1))
    engine.step()
    engine.add(make_job("second", [*history, 2], max_tokens=1))
    engine.step()
    engine.cancel("first", 0)
    finish(engine)
    assert tokens_of(engine, "second") == expected([*history, 2], 1)
    (hit,) = [e.hit for e in engine.events if isinstance(e, Admitted) and e.key[0] == "second"]
    assert hit >= 64


@pytest.mark.parametrize("caching", [False, True])
def test_prompts_that_may_reuse_nothing_wait_for_no_prefix(caching: bool) -> None:
    engine = make_engine(num_blocks=400, budget=4096, beside=4096, caching=caching)
    extra = {"prompt_logprobs": 1} if caching else {}
    for name in "abc":
        engine.add(make_job(name, prompt(160), max_tokens=1, **extra))
    engine.step()
    assert len([e for e in engine.events if isinstance(e, Admitted)]) == 3


def test_a_prompt_without_budget_takes_no_blocks_yet() -> None:
    engine = make_engine(num_blocks=64, budget=8, beside=8)
    engine.add(make_job("first", prompt(60), max_tokens=1))
    engine.add(make_job("second", prompt(60, 1), max_tokens=1))
    for _ in range(5):
        engine.step()
    load = engine.load()
    assert (load.running_requests, load.waiting_requests, load.active_blocks) == (1, 1, 15)
    assert load.waiting_tokens == 60 - 40 + 60
    finish(engine)
    assert engine.load().waiting_tokens == 0


def test_a_reservation_passes_prompts_that_wait_for_budget_only() -> None:
    engine = make_engine(num_blocks=64, budget=8, beside=8)
    engine.add(make_job("first", prompt(60), max_tokens=1))
    engine.add(make_job("second", prompt(60, 1), max_tokens=1))
    engine.step()
    engine.reserve("g", make_job("remote", prompt(20, 2)))
    engine.step()
    assert [e.owner for e in engine.events if isinstance(e, Reserved)] == ["g"]


def test_a_reservation_leaves_the_room_of_those_it_passes() -> None:
    engine = make_engine(num_blocks=35, budget=8, beside=8)
    engine.add(replace(make_job("first", prompt(60), max_tokens=1), failures=2))
    engine.add(replace(make_job("second", prompt(60, 1), max_tokens=1), failures=1))
    engine.step()
    engine.reserve("g", make_job("remote", prompt(20, 2)))
    engine.step()
    assert not any(isinstance(e, Reserved) for e in engine.events)
    while not any(isinstance(e, Reserved) for e in engine.events):
        assert engine.step()
    assert tokens_of(engine, "first")


def test_admission_leaves_running_streams_a_block_to_grow() -> None:
    engine = make_engine(num_blocks=8, beside=8)
    engine.add(make_job("stream", prompt(4), max_tokens=8))
    engine.step()
    engine.reserve("g", make_job("remote", prompt(24, 1)))
    for _ in range(7):
        engine.step()
    assert engine.scheduler.preempted_total == 0
    assert tokens_of(engine, "stream") == expected(prompt(4), 8)
    engine.step()
    assert any(isinstance(e, Reserved) for e in engine.events)


def test_the_whole_pool_can_be_one_request() -> None:
    engine = make_engine(num_blocks=6)
    engine.add(make_job("longest", prompt(23), max_tokens=50))
    finish(engine)
    assert tokens_of(engine, "longest") == expected(prompt(23), 1)
    engine.add(make_job("grows", prompt(8), max_tokens=50))
    finish(engine)
    assert tokens_of(engine, "grows") == expected(prompt(8), 16)
    last = [e.delta for e in engine.events if isinstance(e, Generated)][-1]
    assert last.finish_reason == "length"
    engine.add(make_job("too long", prompt(24)))
    assert isinstance(engine.events[-1], Failed)


def test_the_oldest_stream_is_never_preempted_and_all_finish() -> None:
    engine = make_engine(num_blocks=10, budget=32, beside=32)
    for i in range(6):
        engine.add(make_job(f"r{i}", prompt(7, i), max_tokens=25))
    stalls = 0
    while not tokens_of(engine, "r0") or len(tokens_of(engine, "r0")) < 25:
        before = len(tokens_of(engine, "r0"))
        assert engine.step()
        stalls += len(tokens_of(engine, "r0")) == before
    assert stalls <= 1
    finish(engine)
    assert engine.scheduler.preempted_total > 0
    for i in range(6):
        assert tokens_of(engine, f"r{i}") == expected(prompt(7, i), 25)


def test_queued_prompts_count_what_the_cache_lacks() -> None:
    engine = make_engine(num_blocks=64, budget=8, beside=8)
    engine.add(make_job("warm", prompt(40), max_tokens=1))
    finish(engine)
    engine.add(make_job("first", prompt(60, 1), max_tokens=1))
    engine.add(make_job("cached", [*prompt(40), 5], max_tokens=1))
    assert engine.request_table.waiting_tokens == 60 + 1
    engine.cancel("cached", 0)
    assert engine.request_table.waiting_tokens == 60
    finish(engine)
    assert engine.request_table.waiting_tokens == 0


def test_a_preempted_reservation_is_recomputed_here() -> None:
    engine = make_engine(num_blocks=16)
    tokens = prompt(20)
    engine.reserve("g", make_job("a", tokens, max_tokens=4))
    engine.step()
    grant = next(e for e in engine.events if isinstance(e, Reserved))
    for index, block_id in enumerate(grant.block_ids):
        runner_of(engine).kv[block_id, 0, :, 0, :, 0] = torch.tensor(tokens[4 * index : 4 * index + 4])
    first = expected(tokens, 1)
    engine.start("g", TokenDelta("a", 0, 0, tuple(first)))
    engine.scheduler.preempt(engine.request_table.running[0])
    finish(engine)
    assert first + tokens_of(engine, "a") == expected(tokens, 4)


@pytest.mark.parametrize("bad", [[1, 2, VOCAB], [1, -1, 2]])
def test_ids_that_the_model_lacks_are_refused_and_break_nobody(bad: list[int]) -> None:
    engine = make_engine()
    engine.add(make_job("good", prompt(9)))
    engine.add(make_job("bad", bad))
    engine.add(make_job("bias", prompt(5), logit_bias=((VOCAB, 1.0),)))
    finish(engine)
    failed = {e.key[0]: (e.error.code, e.error.param) for e in engine.events if isinstance(e, Failed)}
    assert failed == {"bad": ("invalid_request_error", "prompt"), "bias": ("invalid_request_error", "logit_bias")}
    assert tokens_of(engine, "good") == expected(prompt(9), 8)


def test_two_attempts_of_a_request_are_cancelled_apart() -> None:
    engine = make_engine()
    engine.add(make_job("a", prompt(9)))
    engine.add(make_job("a", prompt(9), attempt=1))
    engine.step()
    engine.cancel("a", 0)
    finish(engine)
    failed = [e.key for e in engine.events if isinstance(e, Failed)]
    assert failed == [("a", 0)]
    made = [e.delta.token_ids[0] for e in engine.events if isinstance(e, Generated) and e.key == ("a", 1)]
    assert made == expected(prompt(9), 8)


def test_prompt_logprobs_survive_preemption_in_the_middle_of_the_prompt() -> None:
    engine = make_engine(budget=5, beside=5)
    tokens = prompt(23)
    engine.add(make_job("a", tokens, max_tokens=2, prompt_logprobs=1))
    engine.step()
    engine.step()
    engine.scheduler.preempt(engine.request_table.running[0])
    finish(engine)
    scored = next(e.delta.prompt_logprobs for e in engine.events if isinstance(e, Generated))
    assert scored is not None
    assert [entry.token_id for entry in scored[1:] if entry] == tokens[1:]
