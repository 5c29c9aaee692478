"""Merges the dashboard states of all router processes that share a port into one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean

from kvferry.protocol.labels import NODE_STATES
from kvferry.router.dashboard.snapshot import EVENTS, RECENT, RUNNING
from kvferry.router.dashboard.state import Attainment, Counts, Event, Node, State, Suspect, Transfer

OF_NODES = ("joined", "lost", *NODE_STATES, "incompatible")
"""Kinds of events that every router process sees."""


def merged(own: State, others: Sequence[State], count: int) -> State:
    """Merge the states of all `count` processes, some of which may be missing.

    Shared values are taken from this process, and the counts of all processes are added."""
    states = [own, *others]
    answered = f"{len(states)} of {count}" if len(states) < count else f"{count}"
    newest_first = zip_longest(*(reversed(state.points) for state in states))
    running = [request for state in states for request in state.running]
    recent = [request for state in states for request in state.recent]
    return own.model_copy(
        update={
            "router": f"{own.router}, one of {answered} processes",
            "up_s": max(state.up_s for state in states),
            "registry": all(state.registry for state in states),
            "queued": sum(state.queued for state in states),
            "nodes": [_node(node, others) for node in own.nodes],
            "points": [_same_period([point for point in points if point]) for points in newest_first][::-1],
            "total": _same_period([state.total for state in states]),
            "transfers": _transfers(states),
            "running": sorted(running, key=lambda request: -request.seconds)[:RUNNING],
            "running_total": sum(state.running_total for state in states),
            "recent": sorted(recent, key=lambda request: request.ago_s or 0.0)[:RECENT],
            "events": _events(own, others),
            "suspects": _suspects(states),
            "targets": Attainment.of(row for state in states for row in state.targets),
        }
    )


def _same_period(points: Sequence[Counts]) -> Counts:
    """Sum counts of the same period; age and duration are averaged."""
    return Counts.of(points).model_copy(
        update={"ago_s": fmean(point.ago_s for point in points), "seconds": fmean(point.seconds for point in points)}
    )


def _node(node: Node, others: Sequence[State]) -> Node:
    """Return a node with the streams of all processes, and the first trouble that a process reports."""
    seen = [each for state in others for each in state.nodes if (each.id, each.role) == (node.id, node.role)]
    trouble = node.trouble or next((each.trouble for each in seen if each.trouble), "")
    return node.model_copy(update={"streams": node.streams + sum(each.streams for each in seen), "trouble": trouble})


def _transfers(states: Sequence[State]) -> list[Transfer]:
    """Merge transfers: ships are per process and added; copies and moves come from nodes, for all routers."""
    ships: dict[tuple[str, str], list[Transfer]] = {}
    for each in (each for state in states for each in state.transfers if each.kind == "ship"):
        ships.setdefault((each.source, each.target), []).append(each)
    rows = [
        Transfer(
            source=source,
            target=target,
            transfers=sum(row.transfers for row in found),
            blocks=sum(row.blocks for row in found),
            bytes_per_s=sum(row.bytes_per_s for row in found),
            seconds=fmean(row.seconds or 0.0 for row in found),
        )
        for (source, target), found in ships.items()
    ]
    rows.sort(key=lambda row: -row.bytes_per_s)
    return rows + [each for each in states[0].transfers if each.kind != "ship"]


def _events(own: State, others: Sequence[State]) -> list[Event]:
    """Merge events: those of requests from all processes, those of nodes from this one."""
    found = [*own.events, *(event for state in others for event in state.events if event.kind not in OF_NODES)]
    return sorted(found, key=lambda event: event.ago_s)[:EVENTS]


def _suspects(states: Sequence[State]) -> list[Suspect]:
    """Merge suspects: each once, with the longest remaining time."""
    found: dict[tuple[str, str, str], Suspect] = {}
    for suspect in (suspect for state in states for suspect in state.suspects):
        key = (suspect.kind, suspect.prefill, suspect.decode)
        if key not in found or found[key].seconds < suspect.seconds:
            found[key] = suspect
    return list(found.values())
