from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.text.stop_strings import StopMatcher

LETTERS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include=include)
    shown = [matcher.feed(piece) for piece in pieces]
    if matcher.matched is None:
        shown.append(matcher.finish())
    return shown, matcher.matched


def first_end(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """The definition: the occurrence that ends first, the longest of them."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end, end - len(longest), longest
    return None


@given(LETTERS, STOPS, st.lists(st.integers(0, 24)), st.booleans())
def test_any_cutting_of_a_text_shows_the_same(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, matched = run(pieces, stops, include)
    found = first_end(text, stops)
    if found is None:
        assert (matched, "".join(shown)) == (None, text)
    else:
        end, start, stop = found
        assert (matched, "".join(shown)) == (stop, text[: end if include else start])


@given(LETTERS, STOPS)
def test_no_part_of_a_stop_string_is_ever_shown(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    found = first_end(text, stops)
    for char in text:
        shown += matcher.feed(char)
        assert found is None or len(shown) <= found[1]


def test_text_that_cannot_become_a_stop_string_is_shown_at_once() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("hello") == "hello"
    assert matcher.feed(" S") == " "
    assert matcher.feed("T") == ""
    assert matcher.feed("x") == "STx"


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.feed("one\n\ntwo") == "one"
    assert matcher.feed("three") == ""
    assert matcher.matched == "\n\n"


@pytest.mark.parametrize(("include", "shown"), [(True, "a<end>"), (False, "a")])
def test_the_stop_string_is_shown_only_when_asked_for(include: bool, shown: str) -> None:
    assert "".join(run(["a<e", "nd>b"], ["<end>"], include)[0]) == shown
