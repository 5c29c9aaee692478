"""The table of transfers: found by key and by peer, late by deadline."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.kv_transfer.transfers import Transfers


@dataclass
class Rider:
    key: int
    peer: str
    deadline: float = float("inf")


def test_a_transfer_is_found_until_it_is_removed_and_each_that_is_added_is_watched():
    watched = []
    table: Transfers[Rider] = Transfers(lambda: watched.append(1))
    one, two, three = Rider(1, "p"), Rider(2, "p", deadline=5.0), Rider(3, "q", deadline=3.0)
    for rider in (one, two, three):
        table.add(rider)
    assert len(watched) == len(table) == 3
    assert table.of("p") == (one, two)
    assert table.late(4.0) == [three]
    three.deadline = 9.0
    assert table.late(5.5) == [two]
    table.remove(two)
    table.remove(two)
    assert (table.find(1), table.find(2), table.of("p")) == (one, None, (one,))
    table.remove(one)
    assert table.of("p") == ()
