"""A state as a busy cluster makes it, for those who draw it."""

from __future__ import annotations

import math
from typing import Any

from kvferry.router.dashboard.state import (
    Attainment,
    Blocks,
    Counts,
    Event,
    Node,
    RequestSummary,
    State,
    Suspect,
    Transfer,
)

NASTY = "</td><img src=x onerror=alert(1)>\x1b[31m[bold]"


class ScriptedBoard:
    """Shows what it is told to."""

    def __init__(self, state: State) -> None:
        self.shows, self.looks = state, 0

    def state(self, viewer: str | None = None) -> State:
        self.looks += 1
        return self.shows


def node(name: str, role: str, blocks: tuple[int, int, int, int], **changes: Any) -> Node:
    active, cached, granted, free = blocks
    known: dict[str, Any] = {
        "state": "ready", "trouble": "", "running": 3, "most_running": 16, "waiting": 0, "waiting_tokens": 0,
        "streams": 2, "prefill_tokens_per_s": 812.5, "step_s": 0.031, "ship_bytes_per_s": 1.2e9,
    }  # fmt: skip
    pool = Blocks(active=active, cached=cached, granted=granted, free=free, total=sum(blocks))
    return Node(id=name, role=role, model="SmolLM2-135M-Instruct", blocks=pool, **{**known, **changes})


def point(number: int) -> Counts:
    """One of five seconds, of 120."""
    asked, reused = 900 + int(500 * math.sin(number / 7)), 0.2 + 0.6 * number / 120
    wrong = 60 if 70 < number < 80 else 0
    return Counts(
        ago_s=5.0 * (119 - number), seconds=5.0, requests=4, failed=0,
        prompt={"computed": int(asked * (1 - reused)), "reused_prefill": int(asked * reused * 0.8),
                "reused_decode": int(asked * reused * 0.2), "fetched": 0},
        predicted=int(asked * reused) + wrong, missed={"evicted": wrong, "node_lost": wrong // 3}, output=190,
        first_tokens=4, first_token_s=0.21, later_tokens=186, itl_s=0.024,
        refused={"429 overloaded": 3, "503 no_nodes": 1} if 40 < number < 46 else {},
        retries={"another_decode": 2, "move": 1} if number == 77 else {},
    )  # fmt: skip


def ship(source: str, target: str, ships: int, blocks: int, bytes_per_s: float) -> Transfer:
    return Transfer(
        source=source, target=target, transfers=ships, blocks=blocks, bytes_per_s=bytes_per_s, seconds=0.011
    )


def asked(number: int, **changes: Any) -> RequestSummary:
    known: dict[str, Any] = {
        "id": f"chat-{number:04}", "tenant": "", "model": "SmolLM2-135M-Instruct", "work": "generate",
        "prefill": "prefill-1", "decode": f"decode-{number % 3}", "prompt": 600 + number, "cached": 512, "output": 90,
        "queued_s": 0.0004, "first_token_s": 0.18, "seconds": 3.4 + number / 10, "ago_s": 2.0 * number, "retries": 0,
        "outcome": "done",
    }  # fmt: skip
    return RequestSummary(**{**known, **changes})


def busy(**changes: Any) -> State:
    points = [point(number) for number in range(120)]
    nodes = [
        node("prefill-0", "prefill", (40, 300, 0, 660), waiting=2, waiting_tokens=1840),
        node("prefill-1", "prefill", (90, 700, 0, 210)),
        node("decode-0", "decode", (420, 380, 60, 140), running=9),
        node("decode-1", "decode", (210, 640, 20, 130), running=5),
        node("decode-2", "decode", (0, 100, 0, 900), trouble="suspected", running=0, streams=0),
    ]
    known: dict[str, Any] = {
        "router": "router-3f9c0a61d2b4", "version": "2026.11", "up_s": 5025.0, "registry": True,
        "models": ["SmolLM2-135M-Instruct"], "queued": 0, "nodes": nodes, "nodes_total": 5, "points": points,
        "total": Counts.of(points), "transfers_s": 20.0, "running_total": 3,
        "transfers": [
            ship("prefill-1", "decode-0", 41, 1640, 61e6),
            ship("prefill-0", "decode-0", 17, 680, 22e6),
            ship("prefill-0", "decode-1", 12, 400, 9.5e6),
            ship("prefill-1", "decode-1", 3, 90, 0.8e6),
            Transfer(kind="copy", source="decode-0", target="prefill-1", transfers=9, blocks=120, bytes_per_s=2.1e6),
            Transfer(kind="move", source="decode-2", target="decode-1", transfers=3, blocks=210, bytes_per_s=4.4e6),
        ],
        "running": [asked(n, outcome="running", ago_s=None, output=20 * n) for n in range(3)],
        "recent": [asked(10), asked(9, tenant="team-a", outcome="cancelled"),
                   asked(8, retries=2, prefill="", decode="decode-1", cached=0),
                   asked(7, id="", outcome="overloaded", prefill="", decode="", first_token_s=None, output=0),
                   asked(6, work="embed", decode="", output=0)],
        "events": [
            Event(ago_s=12, kind="another_decode", nodes=["decode-2"], told="node_died: decode-2: connection reset",
                  request="chat-0008", tenant=""),
            Event(ago_s=12, kind="lost", nodes=["decode-2"], told="its lease ended", request="", tenant=""),
            Event(ago_s=31, kind="move", nodes=["decode-2", "decode-1"], told="its node drains", request="chat-0007",
                  tenant=""),
            Event(ago_s=64, kind="hedge", nodes=["prefill-0", "decode-1"], told="its first token is overdue",
                  request="chat-0006", tenant="team-a"),
            Event(ago_s=400, kind="joined", nodes=["decode-1"], told="ready", request="", tenant=""),
        ],
        "suspects": [
            Suspect(kind="node", prefill="decode-2", decode="", seconds=1.4),
            Suspect(kind="quarantine", prefill="prefill-0", decode="decode-2", seconds=540),
        ],
        "targets": [
            Attainment(tenant="team-a", target="itl", met=97, missed=1, rejected=2),
            Attainment(tenant="team-a", target="ttft", met=180, missed=0, rejected=20),
        ],
    }  # fmt: skip
    return State(**{**known, **changes})


def hostile() -> State:
    """All that anybody names is NASTY."""
    return busy(
        models=[NASTY, "m"],
        version=NASTY,
        nodes=[_nasty_node("prefill"), _nasty_node("decode")],
        transfers=[ship(NASTY, NASTY, 1, 1, 1.0)],
        running=[asked(1, id=NASTY, tenant=NASTY, model=NASTY, ago_s=None, prefill=NASTY, decode=NASTY, work=NASTY)],
        recent=[asked(1, id=NASTY, tenant=NASTY, model=NASTY, outcome=NASTY, prefill=NASTY, decode=NASTY)],
        events=[Event(ago_s=1, kind=NASTY, nodes=[NASTY], told=NASTY, request=NASTY, tenant=NASTY)],
        suspects=[Suspect(kind="ships", prefill=NASTY, decode=NASTY, seconds=1.0)],
        targets=[Attainment(tenant=NASTY, target="ttft", met=1)],
    )


def _nasty_node(role: str) -> Node:
    return node(NASTY, role, (1, 1, 1, 1)).model_copy(update={"model": NASTY, "state": NASTY})
