"""The states of several processes as one: what is each one's own is added, what all see is told once."""

from __future__ import annotations

from kvferry.router.dashboard.merged import merged
from kvferry.router.dashboard.state import Blocks, Counts, Event, Node, RequestSummary, State, Suspect, Transfer

NODE = Node(
    id="d", role="decode", model="m", state="ready", trouble="", streams=2, running=5, most_running=8, waiting=0,
    blocks=Blocks(active=1, cached=1, granted=0, free=1, total=3), waiting_tokens=0, prefill_tokens_per_s=1, step_s=1,
    ship_bytes_per_s=1,
)  # fmt: skip


def counts(requests: int, seconds: float = 5.0, first_token_s: float = 1.0) -> Counts:
    return Counts(
        ago_s=0, seconds=seconds, requests=requests, failed=0, prompt={"computed": requests}, predicted=0, missed={},
        output=10 * requests, first_tokens=requests, first_token_s=first_token_s,
    )  # fmt: skip


def asked(name: str, seconds: float, ago_s: float | None = None) -> RequestSummary:
    return RequestSummary(
        id=name, tenant="", model="m", work="generate", prefill="", decode="d", prompt=1, cached=0, output=1,
        queued_s=0, first_token_s=None, seconds=seconds, ago_s=ago_s, retries=0,
        outcome="running" if ago_s is None else "done",
    )  # fmt: skip


def state(router: str, **changes: object) -> State:
    told = State(
        router=router, version="1", up_s=10, registry=True, models=["m"], queued=1, nodes=[NODE], nodes_total=1,
        points=[], total=counts(3), transfers=[], transfers_s=20, running=[], running_total=0, recent=[], events=[],
        suspects=[],
    )  # fmt: skip
    return told.model_copy(update=changes)


def ship(bytes_per_s: float, kind: str = "ship") -> Transfer:
    return Transfer(kind=kind, source="p", target="d", transfers=2, blocks=4, bytes_per_s=bytes_per_s, seconds=1.0)


def event(ago_s: float, kind: str) -> Event:
    return Event(ago_s=ago_s, kind=kind, nodes=["d"], told="", request="", tenant="")


def test_what_is_each_one_s_own_is_added() -> None:
    one = state("a", points=[counts(1), counts(4, 2.0)], running=[asked("x", 1)], running_total=1)
    other = state(
        "b",
        up_s=30,
        points=[counts(2, 4.0, 4.0)],
        running=[asked("y", 9)],
        running_total=5,
        recent=[asked("z", 1, 2.0)],
    )
    both = merged(one, [other], 3)
    assert both.router == "a, one of 2 of 3 processes"
    assert (both.up_s, both.queued, both.running_total) == (30, 2, 6)
    assert [each.id for each in both.running] == ["y", "x"]
    assert [each.id for each in both.recent] == ["z"]
    assert [(point.requests, point.seconds) for point in both.points] == [(1, 5.0), (6, 3.0)], "the latest beside it"
    assert both.points[-1].first_token_s == 2.0
    assert (both.total.requests, both.total.seconds, both.total.output) == (6, 5.0, 60)
    assert [(node.streams, node.running) for node in both.nodes] == [(4, 5)], "nodes tell of all routers' work"


def test_what_all_see_is_told_once() -> None:
    seen = {"transfers": [ship(5.0), ship(7.0, "copy")], "events": [event(1, "lost"), event(2, "retry")]}
    one, other = state("a", **seen), state("b", **seen, registry=False)
    other.nodes[0] = NODE.model_copy(update={"trouble": "suspected"})
    one.suspects.append(Suspect(kind="node", prefill="d", decode="", seconds=1))
    other.suspects.append(Suspect(kind="node", prefill="d", decode="", seconds=3))
    both = merged(one, [other], 2)
    assert [(each.kind, each.transfers, each.bytes_per_s) for each in both.transfers] == [
        ("ship", 4, 10),
        ("copy", 2, 7),
    ]
    assert [each.kind for each in both.events] == ["lost", "retry", "retry"]
    assert [each.seconds for each in both.suspects] == [3]
    assert (both.registry, both.nodes[0].trouble) == (False, "suspected")
