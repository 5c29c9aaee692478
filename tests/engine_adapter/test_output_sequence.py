"""Numbers of an attempt's tokens, and a replay that swallows what was delivered."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine_adapter.engine import EngineDelta
from kvferry.engine_adapter.output_sequence import OutputSequence, call_of, resumes
from kvferry.protocol.errors import ReplayDiffers
from kvferry.protocol.messages import Job, TokenDelta, TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate, Grammar

PROMPT = (1, 2, 3)
ALL = ("greedy_resume", "seeded_resume")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, min_tokens=4, stop_token_ids=(99,))


def job(delivered: tuple[int, ...] = (), params: SamplingParams = GREEDY, grammar: Grammar | None = None) -> Job:
    return Job("r", 2, PROMPT + delivered, len(PROMPT), Generate(params, grammar), "router", namespace="tenant")


def pushed(sequence: OutputSequence, *deltas: EngineDelta) -> list[TokenDelta]:
    return [told for each in deltas if (told := sequence.push(each)) is not None]


@pytest.mark.parametrize(
    ("params", "grammar", "keeps", "expected"),
    [
        ({}, None, ("greedy_resume",), True),
        ({}, None, ("seeded_resume", "greedy_replay"), False),
        ({"temperature": 0.5}, None, ("greedy_resume",), False),
        ({"temperature": 0.5}, None, ALL, True),
        ({"presence_penalty": 0.1}, None, ALL, False),
        ({"frequency_penalty": -0.1}, None, ALL, False),
        ({"repetition_penalty": 1.3}, None, ALL, True),
        ({}, Grammar("regex", "a*"), ALL, False),
        ({"bad_words": ((7,),)}, None, ALL, True),
        ({"bad_words": ((7,), (8, 9))}, None, ALL, False),
    ],
)
def test_what_looks_at_the_output_alone_is_never_resumed(params, grammar, keeps, expected):
    assert resumes(job((7,), dataclasses.replace(GREEDY, **params), grammar), keeps) is expected


def test_a_resumed_call_carries_what_was_delivered_and_asks_for_the_rest():
    call = call_of(job((7, 8)), "r-2-1", "lora", 5)
    assert call.token_ids == (*PROMPT, 7, 8)
    assert (call.params.max_tokens, call.params.min_tokens) == (8, 2)
    assert (call.adapter, call.cache_salt, call.request_id) == ("lora", "tenant", "r-2-1")


def test_a_replayed_call_begins_at_the_prompt_with_all_bounds():
    call = call_of(job((7, 8)), "r-2-1", "", 3)
    assert call.token_ids == PROMPT
    assert (call.params.max_tokens, call.params.min_tokens) == (10, 4)


def test_a_resumed_output_is_numbered_behind_what_was_delivered():
    told = pushed(OutputSequence(job((7, 8)), 5), EngineDelta((9,)), EngineDelta((10, 11), cached_tokens=4))
    assert [(each.index, each.token_ids) for each in told] == [(2, (9,)), (3, (10, 11))]
    assert told[1].reuse == Reuse(5, reused_decode=4, computed=1)


OUTPUT = tuple(range(100, 110))


@given(st.integers(0, 10), st.lists(st.integers(1, 9), max_size=8, unique=True))
def test_a_replay_delivers_the_rest_however_the_engine_cuts_it(delivered, cuts):
    bounds = [0, *sorted(cuts), len(OUTPUT)]
    parts = [OUTPUT[a:b] for a, b in itertools.pairwise(bounds)]
    deltas = [EngineDelta(part, tuple(TokenLogprobs(token, -1.0, 1) for token in part)) for part in parts]
    deltas[-1].finish_reason = "length"
    told = pushed(OutputSequence(job(OUTPUT[:delivered]), len(PROMPT)), *deltas)
    assert tuple(token for each in told for token in each.token_ids) == OUTPUT[delivered:]
    at = delivered
    for each in told:
        assert each.index == at
        assert tuple(row.token_id for row in each.logprobs or ()) == each.token_ids
        at += len(each.token_ids)
    assert told[-1].finish_reason == "length"


@given(st.integers(1, 9), st.integers(0, 8))
def test_a_replay_that_differs_ends_at_the_first_difference(delivered, wrong):
    wrong = min(wrong, delivered - 1)
    given_before = (*OUTPUT[:wrong], 5, *OUTPUT[wrong + 1 : delivered])
    sequence = OutputSequence(job(given_before), len(PROMPT))
    assert all(sequence.push(EngineDelta((token,))) is None for token in OUTPUT[:wrong])
    with pytest.raises(ReplayDiffers, match=f"output token {wrong} "):
        sequence.push(EngineDelta((OUTPUT[wrong],)))


def test_a_replay_that_ends_before_what_was_delivered_differs():
    sequence = OutputSequence(job((100, 101, 102)), len(PROMPT))
    with pytest.raises(ReplayDiffers, match="output token 2 "):
        sequence.push(EngineDelta((100, 101), finish_reason="stop"))


def test_a_stop_token_is_named_and_another_end_is_not():
    stopped = pushed(OutputSequence(job(), len(PROMPT)), EngineDelta((7, 99), finish_reason="stop"))
    assert (stopped[0].finish_reason, stopped[0].stop_token) == ("stop", 99)
    cut = pushed(OutputSequence(job(), len(PROMPT)), EngineDelta((7, 98), finish_reason="length"))
    assert (cut[0].finish_reason, cut[0].stop_token) == ("length", None)


def test_the_account_of_a_replay_adds_up_to_what_the_router_sent():
    told = pushed(OutputSequence(job((100,)), len(PROMPT)), EngineDelta((100, 101), None, "length", 3))
    assert told[0].reuse == Reuse(4, reused_decode=3, computed=1)
    assert told[0].reuse.balanced
