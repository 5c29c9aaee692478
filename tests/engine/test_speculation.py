"""Drafts change how many steps a text takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.draft_acceptance import Accepted, accept
from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated, Stepped
from kvferry.engine.ngram_drafts import AT_FIRST, LONGEST, SURE, NgramDrafts
from kvferry.engine.sampler import Sampled
from kvferry.engine.step_cost import ROW, StepCost
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.toy import VOCAB, expected, make_engine, make_job, tokens_of, toy_next

Guess = Callable[[int], bool]
Oracle = Callable[..., None]


def make_oracle(patch: pytest.MonkeyPatch) -> Oracle:
    """Makes drafts what the toy model will say, but for those places of a text that `right` denies, and a step's
    further rows cost so much of the first one: how many drafts are worth their rows depends on no clock."""

    def install(right: Guess, share: float = SURE, further: float = ROW) -> None:
        def look(drafts: NgramDrafts, most: int) -> None:
            known = list(drafts._token_ids)
            for _ in range(most):
                token = toy_next(known)
                known.append(token if right(len(known)) else (token + 1) % VOCAB)
            drafts.found = tuple(known[len(drafts._token_ids) :])
            drafts._shares = [share] * len(AT_FIRST)

        patch.setattr(NgramDrafts, "propose", look)
        saw = StepCost.observe
        patch.setattr(StepCost, "observe", lambda cost, rows, _: saw(cost, rows, 0.01 * (1 + further * (rows - 1))))

    return install


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return make_oracle(monkeypatch)


def finish(engine: Engine) -> int:
    """Steps until nothing is left to do; the books are checked behind each."""
    steps = 0
    while engine.has_work():
        assert engine.step(), "the engine is stuck"
        engine.check_integrity()
        steps += 1
    return steps


def figures(engine: Engine) -> tuple[int, int, int]:
    """Output tokens of decode steps, drafts and right drafts, as told."""
    steps = [event for event in engine.events if isinstance(event, Stepped)]
    return sum(s.decode_tokens for s in steps), sum(s.drafted for s in steps), sum(s.accepted for s in steps)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def test_right_drafts_save_steps_and_change_no_token(oracle: Oracle) -> None:
    oracle(lambda place: True)
    engine = make_engine(drafts=4)
    engine.add(make_job("a", prompt(9), 41))
    assert finish(engine) <= 1 + 1 + 40 // 5 + 3, "five tokens a step, once the drafts are as long"
    assert tokens_of(engine, "a") == expected(prompt(9), 41)
    made, drafted, accepted = figures(engine)
    assert (made, accepted) == (40, drafted)


def test_what_follows_a_wrong_draft_is_not_used(oracle: Oracle) -> None:
    oracle(lambda place: place % 3 != 0)
    engine = make_engine(drafts=6)
    engine.add(make_job("a", prompt(10), 50))
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(10), 50)
    made, drafted, accepted = figures(engine)
    assert made == 49
    assert 0 < accepted < drafted


@pytest.mark.parametrize("stop", range(1, 9))
def test_what_follows_the_end_is_not_used(oracle: Oracle, stop: int) -> None:
    oracle(lambda place: True)
    text = expected(prompt(7, 3), 20)
    engine = make_engine(drafts=8)
    engine.add(make_job("a", prompt(7, 3), 20, stop_token_ids=(text[stop],)))
    engine.add(make_job("b", prompt(7, 3), stop))
    finish(engine)
    assert tokens_of(engine, "a") == text[: text.index(text[stop]) + 1]
    assert tokens_of(engine, "b") == text[:stop]
    assert engine.pool.available == engine.pool.num_blocks


@settings(max_examples=60, deadline=None)
@given(
    wrong=st.sets(st.integers(0, 11)),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=5),
    blocks=st.integers(20, 60),
    most=st.integers(1, 12),
)
def test_any_drafts_beside_others_and_where_blocks_are_few(
    wrong: set[int], lengths: list[tuple[int, int]], blocks: int, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_oracle(patch)(lambda place: place % 12 not in wrong)
        engine = make_engine(blocks, drafts=most)
        for number, (length, count) in enumerate(lengths):
            engine.add(make_job(str(number), prompt(length, number), count))
        finish(engine)
        for number, (length, count) in enumerate(lengths):
            assert tokens_of(engine, str(number)) == expected(prompt(length, number), count)


PARAMS: dict[str, dict[str, object]] = {
    "a seed": {"temperature": 1.3, "seed": 5},
    "top_p": {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "seed": 9},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    "bias": {"logit_bias": ((3, 10.0), (5, 10.02))},
    "allowed": {"allowed_token_ids": (1, 2, 3, 4)},
    "log-probabilities": {"logprobs": 3},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    "bad words": {"bad_words": ((4, 5), (6,))},
}


@pytest.mark.parametrize("name", PARAMS)
def test_whatever_is_drawn_is_drawn_alike(name: str, oracle: Oracle) -> None:
    oracle(lambda place: place % 7 != 0)
    params = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **PARAMS[name]})  # type: ignore[arg-type]
    job = Job("a", 0, (1, 2, 3, 1, 2), 5, Generate(params), "router")
    told = []
    for drafts in (0, 5):
        engine = make_engine(drafts=drafts)
        engine.add(job)
        finish(engine)
        news = [event.delta for event in engine.events if isinstance(event, Generated)]
        told.append([(delta.token_ids, delta.logprobs, delta.finish_reason) for delta in news])
    assert told[0] == told[1]
    assert (figures(engine)[1] == 0) is (name in ("repetition", "frequency", "bad words"))


def test_beside_a_prompt_there_are_none(oracle: Oracle) -> None:
    oracle(lambda place: True)
    engine = make_engine(drafts=4, budget=8, beside=4)
    engine.add(make_job("a", prompt(5), 30))
    while not tokens_of(engine, "a"):
        engine.step()
    engine.add(make_job("b", prompt(21, 1), 2))
    while not tokens_of(engine, "b"):
        before = len(tokens_of(engine, "a"))
        engine.step()
        assert len(tokens_of(engine, "a")) <= before + 1
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(5), 30)


def test_the_longest_match_counts_and_the_latest_of_equal_ones() -> None:
    drafts = NgramDrafts([1, 2, 3, 9, 2, 3, 8, 5, 3, 7, 2, 3])
    drafts.propose(3)
    assert drafts.found == (8, 5, 3)
    drafts = NgramDrafts([1, 2, 3, 9, 4, 3, 8, 1, 2, 3])
    drafts.propose(2)
    assert drafts.found == (9, 4)


def test_what_repeats_is_drafted_on_beyond_its_end() -> None:
    drafts = NgramDrafts([6, 1, 2, 3, 1, 2, 3])
    drafts.propose(8)
    assert drafts.found == (1, 2, 3, 1, 2, 3, 1, 2)


def test_a_token_that_was_not_there_before_drafts_nothing() -> None:
    for token_ids in ([1], [1, 2, 3], [1, 1, 2]):
        drafts = NgramDrafts(token_ids)
        drafts.propose(4)
        assert drafts.found == ()


def test_the_text_may_grow_between_looks() -> None:
    token_ids = [1, 2]
    drafts = NgramDrafts(token_ids)
    for length in range(3, 2000):
        drafts.propose(2)
        token_ids.append(1 + (length - 1) % 7)
    drafts.propose(LONGEST)
    assert drafts.found == tuple(1 + (1999 + i) % 7 for i in range(LONGEST))


def test_drafts_that_are_wrong_are_expected_to_be_wrong() -> None:
    token_ids = [1, 2] * 8
    drafts = NgramDrafts(token_ids)
    drafts.propose(4)
    before = drafts.share
    drafts.observe([9])
    drafts.propose(4)
    assert drafts.share < before
    worse = drafts.share
    drafts.observe([1, 2, 1, 2, 1])
    drafts.propose(4)
    assert drafts.share > worse


def test_of_what_was_drawn_right_drafts_and_the_next_token_count() -> None:
    drawn = [Sampled(token, None) for token in (5, 6, 7, 8)]
    assert accept((5, 6, 7), drawn) == Accepted(tuple(drawn), 3)
    assert accept((5, 9, 7), drawn) == Accepted(tuple(drawn[:2]), 3)
    assert accept((1, 6, 7), drawn) == Accepted((drawn[0],), 3)


def test_a_further_row_costs_what_steps_with_more_rows_took_longer() -> None:
    cost = StepCost()
    assert cost.line() == (1.0, ROW)
    for _ in range(50):
        cost.observe(1, 0.010)
    first, further = cost.line()
    assert first == pytest.approx(0.010)
    assert further == pytest.approx(ROW * 0.010)
    for rows in (1, 4, 8) * 20:
        cost.observe(rows, 0.010 + 0.004 * (rows - 1))
    first, further = cost.line()
    assert first == pytest.approx(0.010, rel=0.05)
    assert further == pytest.approx(0.004, rel=0.05)


def test_where_a_row_costs_as_much_as_a_step_nothing_is_drafted(oracle: Oracle) -> None:
    oracle(lambda place: True, share=0.6, further=1.0)
    engine = make_engine(drafts=4)
    for number in range(8):
        engine.add(make_job(str(number), prompt(9), 200))
        finish(engine)
    made, drafted, _ = figures(engine)
    assert drafted < 0.03 * made
