"""A node's entry: bookings counted once, turns, and the sums over all nodes that are kept at every change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.placement.place import place
from kvferry.placement.types import Demand
from kvferry.protocol.errors import KvferryError, NodeLost, NoNodes, Overloaded
from kvferry.protocol.lease import Load, NodeLease, Rates
from kvferry.protocol.messages import Deviation, Pulse, StepFrame
from kvferry.router.nodes.capacity_summary import CapacitySummary, NodeCapacity
from kvferry.router.nodes.node_entry import NodeEntry, Reservation
from kvferry.router.nodes.reservations import LEASE_LAG_POLLS, Reservations
from tests.fake_workers import BLOCK, lease_of


def ignore(error: KvferryError) -> None:
    pass


def full(waiting: int = 0, step_s: float = 0.02) -> NodeLease:
    """A decode node of 100 blocks, all in use, with `waiting` blocks of prompts before them."""
    load = Load(active_blocks=100, total_blocks=100, waiting_tokens=waiting * BLOCK)
    return lease_of("d1", "decode", load=load, rates=Rates(step_s=step_s))


def serving(lease: NodeLease, room: CapacitySummary) -> NodeEntry:
    entry = NodeEntry(lease, room)
    entry.join(True)
    entry.opened()
    return entry


@given(st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=30), st.integers(0, 2000))
def test_books_balance(steps: list[tuple[int, bool]], leased: int) -> None:
    """Never below the own bookings, never above both together; with the own ones long gone, the lease alone."""
    book, own = Reservations(), []
    for tokens, roll in steps:
        if own and tokens % 3 == 0:
            book.add(-own.pop(), 0, 0)
        else:
            own.append(tokens)
            book.add(tokens, 0, 0)
        if roll:
            book.next_poll()
        counted = book.counted(leased, 0, 0)[0]
        assert sum(own) <= counted <= leased + sum(own)
    while own:
        book.add(-own.pop(), 0, 0)
    for _ in range(LEASE_LAG_POLLS + 1):
        book.next_poll()
    assert book.counted(leased, 0, 0)[0] == leased


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(
            ["promise", "settle", "release", "renew", "forget", "join", "leave", "open", "break", "drain", "look"]
        ),
        st.integers(0, 300),
    ),
    max_size=60,
)


@given(CHANGES)
def test_the_room_is_the_sum_over_all_nodes(changes: list[tuple[int, str, int]]) -> None:
    """Whenever it is looked at it is what a new sum over all nodes would be, and it refuses when placing would."""
    room = CapacitySummary("m")
    entries = [NodeEntry(lease_of(f"d{i}", "decode"), room) for i in range(3)] + [
        NodeEntry(lease_of("p1", "prefill"), room)
    ]
    booked: list[list[Reservation]] = [[] for _ in entries]
    for i, change, size in changes:
        entry, load = entries[i], Load(active_blocks=size, total_blocks=100, waiting_tokens=size)
        match change:
            case "promise":
                booked[i].append(entry.reserve(size, size, ignore))
            case "settle" if booked[i]:
                booked[i][-1].settle()
            case "release" if booked[i]:
                booked[i].pop().release()
            case "renew":
                entry.renew(replace(entry.lease, state="ready", load=load))
            case "drain":
                entry.renew(replace(entry.lease, state="draining", load=load))
            case "forget":
                entry.forget_load()
            case "join" | "leave":
                entry.join(change == "join")
            case "open":
                entry.opened()
            case "break":
                entry.broken(NodeLost("x"))
            case "look":
                assert room.views.get(entry.key) in (None, entry.view)
    parts = [entry._current_capacity() for entry in entries]
    assert room.total[:4] == tuple(map(sum, list(zip(*parts, strict=True))[:4]))
    assert room.total.freed_per_s == pytest.approx(sum(part.freed_per_s for part in parts))
    assert room.views == {entry.key: entry.view for entry in entries if entry._grouped and entry.reachable}
    views = [entry.view for entry, part in zip(entries, parts, strict=True) if part != NodeCapacity()]
    refused: type[KvferryError] | None = None
    try:
        place(Demand(1, local_only=True), views)
    except KvferryError as error:
        refused = type(error)
    assert type(room.refusal() or ValueError()) is (refused or ValueError)


def test_without_a_decode_node_clients_are_told_to_come_back_soon() -> None:
    kept = CapacitySummary("m").refusal()
    with pytest.raises(NoNodes) as placed:
        place(Demand(9), ())
    assert isinstance(kept, NoNodes)
    assert kept.retry_after == placed.value.retry_after == 2.0


@pytest.mark.parametrize(
    ("waiting", "step_s", "seconds"),
    [
        (301, 0.02, 1.0),  # one block too many comes back at once: the least time told
        (400, 0.02, 2.56),  # a whole pool: what running requests hold for 128 steps of 20 ms
        (400, 0.1, 12.8),
        (900, 0.2, 30.0),  # the most
    ],
)
def test_full_nodes_tell_how_long_what_is_too_much_takes(waiting: int, step_s: float, seconds: float) -> None:
    """The same from the kept sums as from placing a request of one block: only what exceeds four pools must go."""
    room = CapacitySummary("m")
    entry = serving(full(waiting, step_s), room)
    kept = room.refusal()
    with pytest.raises(Overloaded) as placed:
        place(Demand(1), [entry.view])
    assert isinstance(kept, Overloaded)
    assert kept.retry_after == pytest.approx(seconds)
    assert placed.value.retry_after == pytest.approx(seconds, abs=1.5 * step_s)


def test_ships_that_were_wrong_are_told_of_once_each() -> None:
    told = []
    entry = NodeEntry(lease_of("d1", "decode"), CapacitySummary("m"), lambda sender, here: told.append((sender, here)))
    entry.deal(StepFrame(deviations=(Deviation("r1", ("p1", 3)), Deviation("r2", ("p2", 4)))))
    assert told == [(("p1", 3), ("d1", 1)), (("p2", 4), ("d1", 1))]


@pytest.mark.parametrize(("pulse", "suspected", "link"), [
    (Pulse(engine_s=0.9, usual_s=0.1), True, False),
    (Pulse(engine_s=0.7, usual_s=0.01), False, False),
    (Pulse(engine_s=0.9, usual_s=0.2), False, False),
    (Pulse(loop_s=1.5, usual_s=0.1), False, False),
    (Pulse(link_s=0.9, usual_s=0.1), False, True),
    (Pulse(link_s=0.7, usual_s=0.01), False, False),
])  # fmt: skip
def test_a_node_is_suspected_while_a_step_or_a_turn_of_its_link_takes_long(
    pulse: Pulse, suspected: bool, link: bool
) -> None:
    entry, told = serving(lease_of("d1", "decode"), CapacitySummary("m")), list[str]()
    for name in ("one", "other"):
        entry.reserve(1, 1, ignore, lambda name=name: told.append(name))  # type: ignore[misc]
    for _ in range(2):
        entry.deal(StepFrame(pulse=pulse))
        assert (entry.suspected, entry.link_suspected) == (suspected, link)
    assert told == (["one", "other"] if suspected or link else []), "once"
    assert entry.reachable
    entry.deal(StepFrame(pulse=Pulse(usual_s=0.1)))
    assert not entry.suspected
    assert not entry.link_suspected
    entry.deal(StepFrame(pulse=pulse))
    assert len(told) == (4 if suspected or link else 0), "and once more"


def test_a_node_is_suspected_while_its_stream_is_silent() -> None:
    entry, told = serving(lease_of("d1", "decode"), CapacitySummary("m")), list[str]()
    entry.reserve(1, 1, ignore, lambda: told.append("suspected"))
    entry.pause()
    assert not entry.suspected
    entry.opened()
    entry.pause(is_silent=True)
    assert entry.suspected
    entry.pause()
    assert (entry.suspected, told) == (True, ["suspected"])
    entry.opened()
    assert not entry.suspected


def test_requests_of_a_step_that_hangs_leave_and_begin_nothing_beside() -> None:
    entry, told = serving(lease_of("d1", "decode"), CapacitySummary("m")), list[str]()
    booking = entry.reserve(1, 1, lambda error: booking.release(), lambda: told.append("suspected"))
    entry.deal(StepFrame(pulse=Pulse(engine_s=2.5, usual_s=0.1)))
    assert entry.idle
    assert (entry.suspected, entry.reachable, told) == (True, False, [])
