"""Suspicions are counted from the routers' log, and false ones told apart from those with a fault behind them."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.deeds import Done
from tests.chaos.plan import Fault
from tests.chaos.suspicions import figures, read_suspicions

ROUTER = "[router-0] 2026-11-29 09:54:59,542 INFO    kvferry.router.dispatch.hedging:"


def test_false_suspicions_are_counted_and_those_without_a_fault_are_told(tmp_path: Path) -> None:
    log = tmp_path / "cluster.log"
    log.write_text(
        f"10.50 {ROUTER} a-1: a second attempt beside the one on decode-1: its node may hang\n"
        f"10.70 {ROUTER} b-1: a second attempt beside the one on prefill-0, decode-0: its node may hang\n"
        f"10.90 {ROUTER} c-1: a second attempt beside the one on prefill-1: its token is overdue\n"
        f"11.00 {ROUTER} b-1: the suspected node's token came first\n"
        f"40.00 {ROUTER} d-1: a second attempt beside the one on decode-1: its node may hang\n"
        f"41.00 {ROUTER} z-9: the suspected node's token came first\n"
    )
    found = read_suspicions(log)
    assert [(each.request, each.nodes, each.false) for each in found] == [
        ("a-1", ("decode-1",), False),
        ("b-1", ("prefill-0", "decode-0"), True),
        ("d-1", ("decode-1",), False),
    ]
    done = [Done(Fault(0.0, "hang engine", "decode-1", 3.0), at=9.0, until=12.0)]
    expected = {"begun": 3, "false": 1, "of_undisturbed_nodes": 2, "false_of_undisturbed_nodes": 1}
    assert figures(found, done) == expected
