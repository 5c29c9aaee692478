"""Which node should take another role, and that no load moves one there and back again."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvferry.placement.role_balance import Change, Demands, backlog_s, role_change
from kvferry.protocol.lease import Load, NodeLease, Rates

REST_S = 30.0


def node(name: str, **changes: object) -> NodeLease:
    """Elastic, of the role that its name begins with."""
    role = "prefill" if name.startswith("p") else "decode"
    lease = NodeLease(name, role, 1, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024, elastic=True)
    return replace(lease, **changes)  # type: ignore[arg-type]


def nodes(prefills: int, decodes: int, **changes: object) -> list[NodeLease]:
    names = [f"p{i}" for i in range(prefills)] + [f"d{i}" for i in range(decodes)]
    return [node(name, **changes) for name in names]


def test_full_decode_nodes_are_given_an_idle_prefill_node() -> None:
    change = role_change(nodes(2, 1), Demands(0.0, 0.95), REST_S)
    assert change is not None
    assert (change.node.node_id, change.role, change.rest_s) == ("p0", "decode", REST_S)
    assert role_change(nodes(2, 1), Demands(0.0, 0.85), REST_S) is None, "not full"
    assert role_change(nodes(1, 1), Demands(0.0, 5.0), REST_S) is None, "the last one"
    assert role_change(nodes(2, 1), Demands(0.6, 0.95), REST_S) is None, "the other one would be behind"


def test_prefill_nodes_that_are_behind_are_given_the_decode_node_with_least_to_do() -> None:
    fleet = [*nodes(1, 1, pressure=0.2), node("d1", pressure=0.1)]
    change = role_change(fleet, Demands(2.5, 0.3), REST_S)
    assert change is not None
    assert (change.node.node_id, change.role) == ("d1", "prefill")
    assert role_change(fleet, Demands(1.5, 0.3), REST_S) is None, "not behind"
    assert role_change(fleet, Demands(2.5, 0.7), REST_S) is None, "the other one would be full"
    assert role_change(nodes(1, 1), Demands(9.0, 0.0), REST_S) is None, "the last one"


def test_only_an_idle_prefill_node_that_may_changes() -> None:
    busy = node("p0", load=Load(running_requests=1)), node("p1", load=Load(waiting_requests=1))
    assert role_change([*busy, *nodes(0, 1)], Demands(0.0, 1.0), REST_S) is None
    change = role_change([*busy, node("p2"), *nodes(0, 1)], Demands(0.0, 1.0), REST_S)
    assert change is not None
    assert change.node.node_id == "p2"
    assert role_change(nodes(3, 1, elastic=False), Demands(0.0, 1.0), REST_S) is None


@pytest.mark.parametrize("changes", [{"state": "draining"}, {"leaving": True}, {"role_s": 29.0}])
def test_one_change_at_a_time_and_then_roles_rest(changes: dict[str, object]) -> None:
    fleet = [*nodes(3, 1), node("d1", **changes)]
    assert role_change(fleet, Demands(0.0, 3.0), REST_S) is None
    assert role_change([*nodes(3, 1), node("d1", role_s=31.0)], Demands(0.0, 3.0), REST_S) is not None


def test_without_any_decode_node_nothing_rests() -> None:
    change = role_change([node("p0", role_s=1.0), node("p1")], Demands(0.0, 0.1), REST_S)
    assert change == Change(node("p0", role_s=1.0), "decode", 0.0)
    assert role_change(nodes(2, 0), Demands(0.0, 0.0), REST_S) is None, "nobody asks"


def test_no_load_asks_back_what_it_was_given() -> None:
    """Whatever is asked of however many nodes: once a change is made, the same load does not undo it."""
    for prefills, decodes in product(range(6), range(6)):
        for backlog, pressure in product([0.0, 0.3, 0.6, 1.0, 2.0, 4.0, 9.0], [0.0, 0.3, 0.6, 0.9, 1.5, 2.0, 4.0, 9.0]):
            asked = Demands(backlog, pressure)
            change = role_change(nodes(prefills, decodes), asked, 0.0)
            if change is None:
                continue
            step = 1 if change.role == "decode" else -1
            after = role_change(nodes(prefills - step, decodes + step), asked, 0.0)
            assert after is None or after.role == change.role, (prefills, decodes, asked)


def test_each_nodes_prompts_are_seconds_of_its_own() -> None:
    leases = [node("p0", load=Load(waiting_tokens=500), rates=Rates(1000.0)), node("d0", load=Load(waiting_tokens=100))]
    assert backlog_s(leases) == pytest.approx(0.6)
