"""The choice of an encode node compares seconds: what is queued, what is held, and the way of the rows."""

from __future__ import annotations

import pytest

from kvferry.placement.encoders import USUAL_TOKENS_PER_S, Encoder, expected_s, ranked

OWN = Encoder(("p", 1), 0, 200, 0.0)


def node(name: str, queued: int = 0, missing: int = 200, rate: float = 100.0, size: int = 0) -> Encoder:
    return Encoder((name, 1), queued, missing, rate, size, 1e6)


def names(*encoders: Encoder, own: Encoder = OWN) -> list[str]:
    return [each.key[0] for each in ranked(encoders, own)]


@pytest.mark.parametrize(
    ("encoders", "order"),
    [
        ((node("busy", queued=100), node("idle")), ["idle", "busy"]),
        ((node("slow", rate=50.0), node("fast")), ["fast", "slow"]),
        ((node("fast", rate=400.0), node("holds", queued=900, missing=0)), ["holds", "fast"]),
        ((node("first"), node("second")), ["first", "second"]),
        ((), []),
    ],
)
def test_the_fastest_comes_first(encoders: tuple[Encoder, ...], order: list[str]) -> None:
    assert names(*encoders) == order


def test_rows_that_the_prompts_node_holds_are_asked_of_nobody() -> None:
    assert names(node("e"), own=Encoder(("p", 1), 0, 0, 0.0)) == []


def test_the_prompts_node_encodes_where_that_is_surely_faster() -> None:
    """Seconds in which it computes no prompts count twice."""
    own = Encoder(("p", 1), 0, 200, 100.0)
    assert names(node("e", queued=150), own=own) == ["e"]
    assert names(node("e", queued=250), own=own) == []
    assert names(node("e", size=1_500_000), own=own) == ["e"]
    assert names(node("e", size=2_500_000), own=own) == []


def test_a_node_that_is_new_is_asked_though_the_prompts_node_has_encoded() -> None:
    """It was judged by a slow CPU's rate, never asked, and so never learned its own."""
    own = Encoder(("p", 1), 0, 200, 5000.0)
    assert names(node("new", rate=0.0), node("slow", rate=1000.0), own=own) == ["new"]


def test_a_node_that_never_encoded_is_judged_by_a_usual_rate() -> None:
    assert node("new", rate=0.0).encode_s == 200 / USUAL_TOKENS_PER_S
    assert expected_s(200, (0.0,)) == expected_s(200, ()) == 200 / USUAL_TOKENS_PER_S
    assert expected_s(200, (0.0, 50.0, 100.0)) == 2.0
