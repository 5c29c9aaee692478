"""Beam search against every sequence there is, and against a search that never stops early."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.messages import TokenLogprobs
from kvferry.router.dispatch.beam_search import BeamSearch

PROMPT_LEN = 3
Next = Callable[[tuple[int, ...]], list[float]]
Scored = list[tuple[tuple[int, ...], float]]


def model(seed: int, vocab: int) -> Next:
    """Log-probabilities of the next token, made up of the tokens so far; no two alike."""

    def following(tokens: tuple[int, ...]) -> list[float]:
        weights = [random.Random(f"{seed}{tokens}{token}").random() ** 3 + 1e-3 for token in range(vocab)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return following


def top(values: list[float], count: int) -> list[tuple[int, float]]:
    return sorted(enumerate(values), key=lambda pair: -pair[1])[:count]


def searched(following: Next, width: int, length: int, ending: set[int], penalty: float) -> tuple[Scored, int]:
    """What the search finds, and how many steps it took."""
    search = BeamSearch(width, PROMPT_LEN, length, sorted(ending), penalty)
    steps = 0
    while search.live:
        told = []
        for beam in search.live:
            values = following(beam.token_ids)
            told.append(TokenLogprobs(0, values[0], 1, tuple(top(values, search.candidates))))
        search.advance(told)
        steps += 1
    best = search.best(width)
    assert all(beam.cumulative == pytest.approx(sum(e.logprob for e in beam.entries)) for beam in best)
    assert all(beam.ended == (beam.token_ids[-1] in ending) for beam in best)
    return [(beam.token_ids, beam.score) for beam in best], steps


def score(tokens: tuple[int, ...], total: float, ending: set[int], penalty: float) -> float:
    return float(total / (PROMPT_LEN + len(tokens) - (tokens[-1] in ending)) ** penalty)


def total(following: Next, tokens: tuple[int, ...]) -> float:
    return sum(following(tokens[:i])[token] for i, token in enumerate(tokens))


def exhaustive(following: Next, vocab: int, length: int, ending: set[int], penalty: float) -> Scored:
    """Every sequence that ends once, at its end or at the longest."""
    found = []
    for size in range(1, length + 1):
        for tokens in product(range(vocab), repeat=size):
            whole = tokens[-1] in ending or size == length
            if whole and not ending.intersection(tokens[:-1]):
                found.append((tokens, score(tokens, total(following, tokens), ending, penalty)))
    return sorted(found, key=lambda pair: -pair[1])


def patient(following: Next, width: int, length: int, ending: set[int], penalty: float) -> Scored:
    """The search as vLLM runs it: to the last step, all that ended kept."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: Scored = []
    for _ in range(length):
        grown: Scored = []
        for tokens, known in live:
            for token, logprob in top(following(tokens), 2 * width):
                (ended if token in ending else grown).append(((*tokens, token), known + logprob))
        live = sorted(grown, key=lambda pair: -score(pair[0], pair[1], ending, penalty))[:width]
    scored = [(tokens, score(tokens, known, ending, penalty)) for tokens, known in [*ended, *live]]
    return sorted(scored, key=lambda pair: -pair[1])[:width]


def same(found: Scored, wanted: Scored) -> bool:
    return [t for t, _ in found] == [t for t, _ in wanted] and all(
        a == pytest.approx(b) for (_, a), (_, b) in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("ending", [set(), {1}, {0, 3}], ids=str)
def test_as_wide_as_all_there_is_it_finds_the_best_of_all(ending: set[int], penalty: float) -> None:
    for seed in range(6):
        following = model(seed, 4)
        found, _ = searched(following, 64, 3, ending, penalty)
        wanted = exhaustive(following, 4, 3, ending, penalty)
        assert same(found, wanted[:64]), seed


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 7), st.sets(st.integers(0, 5), max_size=2),
       st.sampled_from([0.0, 0.5, 1.0, 2.0, -0.5]))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_it_finds_what_a_search_to_the_end_finds(
    seed: int, width: int, length: int, ending: set[int], penalty: float
) -> None:
    following = model(seed, 6)
    found, _ = searched(following, width, length, ending, penalty)
    assert same(found, patient(following, width, length, ending, penalty))


def test_it_stops_when_no_live_beam_can_win() -> None:
    def ends(tokens: tuple[int, ...]) -> list[float]:
        return [math.log(0.9), math.log(0.06), math.log(0.04)]

    found, steps = searched(ends, 1, 1000, {0}, 0.0)
    assert found == [((0,), pytest.approx(math.log(0.9)))]
    assert steps == 1


def test_a_width_of_one_is_greedy() -> None:
    following = model(3, 9)
    found, steps = searched(following, 1, 6, set(), 1.0)
    greedy: tuple[int, ...] = ()
    for _ in range(6):
        greedy += (top(following(greedy), 1)[0][0],)
    assert ([tokens for tokens, _ in found], steps) == ([greedy], 6)


def test_an_extension_knows_its_parent_rank_and_log_probability() -> None:
    search = BeamSearch(2, 1, 3, (), 1.0)
    search.advance([TokenLogprobs(5, -0.1, 1, ((5, -0.1), (6, -2.0), (7, -3.0), (8, -4.0)))])
    assert [beam.token_ids for beam in search.live] == [(5,), (6,)]
    search.advance([
        TokenLogprobs(1, -5.0, 1, ((1, -5.0), (2, -6.0))), TokenLogprobs(3, -0.5, 1, ((4, -0.4), (3, -0.5)))
    ])  # fmt: skip
    assert [(beam.token_ids, beam.parent) for beam in search.live] == [((6, 4), 1), ((6, 3), 1)]
    assert [(entry.logprob, entry.rank) for entry in search.live[1].entries] == [(-2.0, 2), (-0.5, 2)]
