"""Rows of the blocks of a tier: as a pool that has the whole chain tells them."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.tiers.catalog import Catalog
from kvferry.protocol.index_rows import rows_of

CHAIN = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(60)]
ROWS = rows_of(CHAIN)


@dataclass(frozen=True, eq=False)
class Part:
    name: str
    parent: bytes
    hashes: tuple[bytes, ...]
    size: int = 1


def part(first: int, end: int, name: str = "") -> Part:
    return Part(name or f"{first}-{end}", CHAIN[first - 1] if first else b"", tuple(CHAIN[first:end]))


@given(st.sets(st.integers(1, 59), max_size=8), st.randoms(use_true_random=False))
def test_rows_are_those_of_the_chain_in_whatever_order_its_parts_are_found(
    ends: set[int], source: random.Random
) -> None:
    bounds = [0, *sorted(ends), 60]
    parts = [part(first, end) for first, end in pairwise(bounds)]
    source.shuffle(parts)
    assert sorted(Catalog(parts).rows()) == sorted(ROWS)
    later: Catalog[Part] = Catalog()
    told = [row for each in parts for row in later.enter(each)[0]]
    assert sorted(told) == sorted(later.rows()) == sorted(ROWS)
    parts.sort(key=lambda each: CHAIN.index(each.hashes[0]), reverse=True)
    gone = [row for each in parts for row in later.leave(each)]
    assert (sorted(gone), later.rows()) == (sorted(ROWS), [])


def test_what_stands_behind_a_lost_part_has_rows_once_that_is_there_again() -> None:
    catalog = Catalog([part(0, 5), part(9, 20), part(20, 30)])
    assert catalog.rows() == ROWS[:5]
    assert sorted(catalog.hashes()) == sorted([*CHAIN[:5], *CHAIN[9:30]])
    came, left = catalog.enter(part(5, 9))
    assert (sorted(came), left) == (sorted(ROWS[5:30]), [])
    assert sorted(catalog.rows()) == sorted(ROWS[:30])


def test_what_stands_behind_a_part_that_is_lost_has_no_rows_until_that_is_there_again() -> None:
    """Else an index tells of a prefix with a hole in it, of which no more than its beginning can be read."""
    middle = part(5, 9)
    catalog = Catalog([part(0, 5), middle, part(9, 20), part(20, 30), part(40, 50)])
    assert sorted(catalog.leave(middle)) == sorted(ROWS[5:30])
    assert catalog.rows() == ROWS[:5]
    assert sorted(catalog.hashes()) == sorted([*CHAIN[:5], *CHAIN[9:30], *CHAIN[40:50]])
    assert (sorted(catalog.enter(middle)[0]), sorted(catalog.rows())) == (sorted(ROWS[5:30]), sorted(ROWS[:30]))


def test_a_part_that_takes_the_place_of_another_tells_what_went_with_that() -> None:
    catalog = Catalog([part(0, 20), part(20, 30, "same")])
    came, left = catalog.enter(part(20, 25, "same"))
    assert (came, sorted(left)) == (ROWS[20:25], sorted(ROWS[25:30]))
    assert sorted(catalog.rows()) == sorted(ROWS[:25])


def test_a_ring_of_parts_has_no_rows_and_no_end_is_waited_for() -> None:
    ring = [Part("a", CHAIN[3], (CHAIN[1], CHAIN[2])), Part("b", CHAIN[2], (CHAIN[3],))]
    catalog = Catalog([*ring, part(0, 1)])
    assert catalog.rows() == ROWS[:1]
    assert catalog.enter(Part("c", CHAIN[0], (CHAIN[2],)))[0][0] == rows_of([CHAIN[0], CHAIN[2]])[1]
    assert len(set(catalog.rows())) == 4
