"""Deltas in any order, cut anywhere, repeated: the tokens come out once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.messages import TokenDelta, TokenLogprobs
from kvferry.router.dispatch.token_order import OrderedTokens


def delta(index: int, tokens: list[int], reason: str | None = None) -> TokenDelta:
    logprobs = tuple(TokenLogprobs(token, -1.0, 1) for token in tokens)
    return TokenDelta("r", 0, index, tuple(tokens), logprobs, reason)


@given(st.integers(1, 40), st.data())
def test_any_order_any_overlap(count: int, data: st.DataObject) -> None:
    tokens = list(range(1000, 1000 + count))
    pieces = [(i, i + 1) for i in range(count)]
    pieces += data.draw(
        st.lists(st.tuples(st.integers(0, count), st.integers(0, count)).map(lambda pair: (min(pair), max(pair))))
    )
    deltas = [delta(a, tokens[a:b], "length" if b == count else None) for a, b in pieces]
    sequence, out = OrderedTokens(), []
    for part in data.draw(st.permutations(deltas)):
        out += list(sequence.push(part))
    assert [token for part in out for token in part.token_ids] == tokens == sequence.tokens
    assert [entry.token_id for part in out for entry in part.logprobs] == tokens
    assert [part.finish_reason for part in out] == [None] * (len(out) - 1) + ["length"]
    assert sequence.finished


def test_nothing_comes_before_its_time() -> None:
    sequence = OrderedTokens()
    assert list(sequence.push(delta(1, [11]))) == []
    assert [part.token_ids for part in sequence.push(delta(0, [10]))] == [(10,), (11,)]


def test_ending_without_a_token() -> None:
    sequence = OrderedTokens()
    assert len(list(sequence.push(delta(0, [10])))) == 1
    assert [part.finish_reason for part in sequence.push(delta(1, [], "length"))] == ["length"]


def test_restart_forgets_what_came_early() -> None:
    sequence = OrderedTokens()
    list(sequence.push(delta(2, [99])))
    sequence.restart()
    assert [part.token_ids for part in sequence.push(delta(0, [1, 2, 3]))] == [(1, 2, 3)]
