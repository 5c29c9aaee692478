"""Requests that fork: what they share with one another is computed once, and whatever is there of it or not, their
tokens are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Generated, Reserved, Stepped
from kvferry.engine.partial_blocks import PartialBlock, PartialBlocks
from kvferry.engine.request_states import Awaits
from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from tests.toy import VOCAB, expected, finish, make_engine, make_job, runner_of, tokens_of

LENGTHS = [1, 3, 4, 5, 8, 14, 16, 17]


def prompt(length: int) -> list[int]:
    return [(7 * i + 3) % VOCAB for i in range(length)]


def fork(name: str, tokens: list[int], of: str, max_tokens: int = 6, **params: Any) -> Job:
    return replace(make_job(name, tokens, max_tokens, **params), fork_of=of)


def reuse_of(engine: Engine, name: str) -> Reuse:
    (reuse,) = [e.delta.reuse for e in engine.events if isinstance(e, Generated) and e.key[0] == name and e.delta.reuse]
    assert reuse.balanced
    return reuse


def computed(engine: Engine) -> int:
    return sum(e.prefill_tokens for e in engine.events if isinstance(e, Stepped))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("leads", ["runs", "ended"])
def test_forks_compute_the_last_token_of_the_prompt_alone(length: int, leads: str) -> None:
    engine = make_engine(num_blocks=128)
    engine.add(make_job("leader", prompt(length), 20 if leads == "runs" else 1))
    engine.step()
    assert bool(engine.request_table) == (leads == "runs" or length > 16)
    while not tokens_of(engine, "leader"):
        engine.step()
    for i in range(4):
        engine.add(fork(f"f{i}", prompt(length), "leader"))
    finish(engine)
    for i in range(4):
        assert tokens_of(engine, f"f{i}") == expected(prompt(length), 6)
        assert reuse_of(engine, f"f{i}") == Reuse(length, reused_decode=length - 1, computed=1)
    assert computed(engine) == length + 4


def test_forks_hold_the_leader_s_full_blocks_and_one_of_their_own() -> None:
    engine = make_engine(num_blocks=128)
    engine.add(make_job("leader", prompt(14), 40))
    engine.step()
    for i in range(3):
        engine.add(fork(f"f{i}", prompt(14), "leader", 40))
    engine.step()
    chains = [request.block_ids for request in engine.request_table.running]
    assert len({tuple(chain[:3]) for chain in chains}) == 1
    assert len({chain[3] for chain in chains}) == 4
    assert engine.load().active_blocks == 3 + 4


def test_a_fork_goes_on_from_what_its_parent_made() -> None:
    """As a beam does: the parent's tokens and one more, chosen elsewhere."""
    engine = make_engine(num_blocks=128)
    tokens = prompt(13)
    engine.add(make_job("b0", tokens, 1))
    finish(engine)
    for step in range(1, 12):
        tokens = [*tokens, (5 * step) % VOCAB]
        engine.add(fork(f"b{step}", tokens, f"b{step - 1}", 1))
        finish(engine)
        assert tokens_of(engine, f"b{step}") == expected(tokens, 1)
        assert reuse_of(engine, f"b{step}").computed == 1


@pytest.mark.parametrize("width", [2, 5, 20])
def test_beams_of_a_step_leave_each_other_s_parents_in_place(width: int) -> None:
    """What a step of beams freed is copied by the next one's, each from its own parent, whichever comes first."""
    engine = make_engine(num_blocks=128)
    beams = [prompt(5)]
    engine.add(make_job("b0-0", beams[0], 1))
    finish(engine)
    for step in range(1, 4):
        beams = [[*beams[(3 * i) % len(beams)], (11 * step + i) % VOCAB] for i in range(width)]
        for i, tokens in enumerate(beams):
            engine.add(fork(f"b{step}-{i}", tokens, f"b{step - 1}-{(3 * i) % len(beams)}", 1))
        finish(engine)
        assert [reuse_of(engine, f"b{step}-{i}").computed for i in range(width)] == [1] * width
        assert [tokens_of(engine, f"b{step}-{i}") for i in range(width)] == [expected(tokens, 1) for tokens in beams]


def test_a_request_that_is_no_fork_reuses_full_blocks_only() -> None:
    engine = make_engine()
    for name in ("a", "b"):
        engine.add(make_job(name, prompt(14), 1))
        finish(engine)
    assert reuse_of(engine, "b") == Reuse(14, reused_decode=12, computed=2)


@pytest.mark.parametrize("caching", [False, True])
def test_a_fork_of_nobody_computes_its_prompt(caching: bool) -> None:
    engine = make_engine(caching=caching)
    engine.add(make_job("leader", prompt(14), 1))
    finish(engine)
    engine.add(fork("f", prompt(14) if not caching else [9, *prompt(14)], "leader"))
    finish(engine)
    assert reuse_of(engine, "f").cached_len == 0
    assert tokens_of(engine, "f") == expected(prompt(14) if not caching else [9, *prompt(14)], 6)


def test_prompt_logprobs_of_a_fork_are_of_the_whole_prompt() -> None:
    engine = make_engine()
    engine.add(make_job("leader", prompt(14), 1))
    finish(engine)
    engine.add(fork("f", prompt(14), "leader", 1, prompt_logprobs=0))
    finish(engine)
    assert reuse_of(engine, "f") == Reuse(14, computed=14)


def land(engine: Engine, grant: str, tokens: list[int]) -> None:
    request = engine.request_table.by_grant(grant)
    assert request is not None
    for index, block_id in enumerate(request.block_ids):
        part = tokens[4 * index : 4 * index + 4]
        runner_of(engine).kv[block_id, 0, :, 0, : len(part), 0] = torch.tensor(part, dtype=torch.float32)
    engine.start(grant, TokenDelta("leader", 0, 0, tuple(expected(tokens, 1))))


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("comes", [False, True])
def test_a_fork_awaits_the_blocks_that_are_on_their_way(granted: bool, comes: bool) -> None:
    engine = make_engine(num_blocks=12)
    tokens = prompt(14)
    engine.reserve("g", make_job("leader", tokens, 6))
    if granted:
        engine.step()
    for i in range(2):
        engine.add(fork(f"f{i}", tokens, "leader"))
    engine.step()
    assert all(engine.request_table.awaiting[f"f{i}", 0].awaits == {Awaits.KV} for i in range(2))
    assert [e.owner for e in engine.events if isinstance(e, Reserved)] == ["g"]
    if comes:
        land(engine, "g", tokens)
    else:
        engine.withdraw("g", TransferFailed("peer lost"))
        engine.transfer_holds.grant_quiet("g")
    finish(engine)
    assert [tokens_of(engine, f"f{i}") for i in range(2)] == [expected(tokens, 6)] * 2
    assert computed(engine) == (2 if comes else 14 + 1), "the second fork waits for what the first computes"


def test_a_first_token_that_is_none_leaves_no_fork_behind() -> None:
    engine = make_engine()
    engine.reserve("g", make_job("leader", prompt(9)))
    engine.step()
    engine.add(fork("f", prompt(9), "leader"))
    engine.start("g", TokenDelta("leader", 0, 0, ()))
    assert [e.key[0] for e in engine.events if isinstance(e, Failed)] == ["leader"]
    finish(engine)
    assert len(tokens_of(engine, "f")) == 6


def test_a_fork_that_awaits_can_be_cancelled() -> None:
    engine = make_engine()
    engine.reserve("g", make_job("leader", prompt(9)))
    engine.add(fork("f", prompt(9), "leader"))
    engine.cancel("f", 0)
    engine.withdraw("g", TransferFailed("peer lost"))
    finish(engine)
    assert not engine.request_table


@settings(max_examples=60, deadline=None)
@given(st.integers(6, 24), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), max_size=12))
def test_forks_in_a_pool_that_is_too_small_say_the_same(blocks: int, jobs: list[tuple[int, int, int]]) -> None:
    """Blocks are taken anew, forks preempted, leaders gone: nobody reads what is not his."""
    engine = make_engine(num_blocks=blocks, seqs=4)
    wanted: dict[str, list[int]] = {}
    for number, (kind, extra, steps) in enumerate(jobs):
        tokens = [kind, *prompt(9)][: 6 + kind] + [extra] * (extra % 3)
        name = f"r{number}"
        engine.add(fork(name, tokens, f"r{max(0, number - 1)}", 7))
        wanted[name] = expected(tokens, 7)
        for _ in range(steps):
            engine.step()
    finish(engine)
    assert {name: tokens_of(engine, name) for name in wanted} == wanted


def test_a_tail_is_found_by_what_it_has_in_front_until_its_block_is_taken() -> None:
    tails = PartialBlocks()
    tails.put(b"p", [1, 2, 3], 7)
    tails.put(b"p", [1, 2], 8)
    tails.put(b"q", [1, 2, 3], 9)
    assert tails.match(b"p", [1, 2, 3, 4]) == PartialBlock(7, 3)
    assert tails.match(b"p", [1, 9]) == PartialBlock(8, 1)
    assert tails.match(b"p", [2]) is None
    assert tails.match(b"p", []) is None
    assert tails.match(b"r", [1]) is None
    tails.forget(7)
    assert tails.match(b"p", [1, 2, 3, 4]) == PartialBlock(8, 2)
    tails.put(b"p", [1, 2], 10)
    assert tails.match(b"p", [1, 2]) == PartialBlock(10, 2)
    tails.forget(8)
    tails.put(b"q", [5], 10)
    assert tails.match(b"p", [1, 2]) is None
    for block_id in (9, 10, 11):
        tails.forget(block_id)
    assert (len(tails), tails._by_parent) == (0, {})
